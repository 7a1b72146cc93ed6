"""The CPU side: every decision, no tensor.

Owns admission, scheduling, block bookkeeping, the prefix index and the token log of every request.
Does not know the layout of a KV cache, the device of a worker, or torch.
"""

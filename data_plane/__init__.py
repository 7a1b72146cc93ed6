"""The worker: every tensor, no decision.

Owns the KV cache bytes, the device block table and per-row state, and the model. Applies the plans
of the control stream in order. Does not know requests, tenants, prefix hashes or Redis.
"""

"""Paged attention behind one interface: layouts, cache writes, block copies, the forward pass.

Owns: what a KV block looks like in memory and how queries read it. Does not know: plans, rows,
who owns a block, sampling or the model around a layer.
"""

"""`pagewire bench`: load of a known shape, and what it took.

Owns: workloads, arrivals, what is measured of a call, how it is summed up. Does not know: the
server's insides; it sends what any client could send. Standard library, grpc and protobuf; a plot
needs matplotlib (`pip install 'pagewire[bench]'`).

Reading order: `config` (what is asked for), `lengths` and `workload` (the requests), `load` (one
process that sends them), `processes` (several), `records` and `report` (what came of it).
"""

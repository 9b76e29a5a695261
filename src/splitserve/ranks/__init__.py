"""One model over several processes and hosts: groups of KV managers, followers, nodes, lockstep.

`processes.py` starts the ranks. `rank_channel.py` carries the driver's orders, `rank_process.py` executes the steps.
`kv_follower.py` executes the KV transfers that the driver orders (`transfer/room.py`) on each other rank.
`node_wire.py` connects the hosts of a worker, `lockstep_channel.py` keeps data parallel schedulers in step.
"""

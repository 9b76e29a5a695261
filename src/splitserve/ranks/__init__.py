"""One model over several processes and hosts: groups of KV managers, followers, nodes, lockstep.

`kv_group.py` drives the KV transfer of all ranks as one, `kv_follower.py` is its counterpart in each rank.
`node_wire.py` connects the hosts of a worker, `lockstep_channel.py` keeps data parallel schedulers in step.
"""

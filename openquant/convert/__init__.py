"""Carry out a plan on threads: read, quantize and write one bounded piece at a time.

conversion  convert() writes the shards of a plan into a claimed output directory; its ShardProvider provides source
            shards (from a disk, a cache or a download), and learns which output shards are finished; compares each
            with its plan before it has its final name. Kernels are the arithmetic of a CPU, or of a torch device

sizes = {shard.name: shard.nbytes for shard in plan.layout.shards}
with Claim(path, OutputContents(plan.digest, sizes, others={}), overwrite=False) as claim:
    convert(plan, plan.layout.shards, transfer, claim.directory, workers=2)  # every shard whole, under its final name
"""

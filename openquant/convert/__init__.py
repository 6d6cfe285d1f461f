"""Carry out a plan: a bounded piece read, encoded and written at a time, on threads.

convert  writes shards of a plan into a claimed output directory
ShardTransfer  how source shards come and output shards go: from a disk, from a cache, through a scratch directory

sizes = {shard.name: shard.nbytes for shard in plan.layout.shards}
with Claim(path, OutputContents(plan.digest, sizes, others={}), overwrite=False) as claim:
    convert(plan, plan.layout.shards, traffic, claim.directory, workers=2)  # every shard whole, under its final name
"""

"""The Hugging Face Hub: a name becomes a source, shards come as they are needed, an output is published.

What is needed of a plan comes as names and sizes; nothing here knows what a plan is.

    source          a directory, or a repository of which most is still on the Hub
    fetch           source shards by the time they are needed, from the cache or through a scratch directory
    shards          the same for commands that write no shards
    preflight       what is asked of the Hub before a repository is made
    publish         uploads finished shards, and makes them a model with one commit
    error_mapping   what huggingface_hub raises -> errors that keep the server's reason and say what to do

    source = find_source("Qwen/Qwen3-8B@main")
    shard = "model-00001-of-00005.safetensors"
    with ShardSupply(source, {shard: [shard]}, None) as supply:
        supply.wait_for(shard, stopped)
"""

"""The Hugging Face Hub: finds sources, downloads shards as they are needed, and publishes outputs.

Callers pass names and sizes of shards. Nothing in this room knows a plan.

    source          Source, a local directory or a repository on the Hub, and HubFile, one file of a repository;
                    ShardSupply, which downloads source shards into the Hub's cache or a scratch directory, and
                    supply_shards, which starts supplies for commands that write no shards
    publish         Publisher, which uploads finished shards and commits them all at once; checks before a push: token,
                    permissions, and what the push would replace
    error_mapping   exceptions of huggingface_hub as OpenQuantErrors with the server's reason and a hint

    source = find_source("Qwen/Qwen3-8B@main")
    shard = "model-00001-of-00005.safetensors"
    with ShardSupply(source, {shard: [shard]}, None) as supply:
        supply.wait_for(shard, stopped)
"""

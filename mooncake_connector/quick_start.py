"""The commands to begin with, the same in README.md, in `mooncake-connector --help` and in what `doctor` advises."""

VLLM = r"""vllm serve MODEL --kv-transfer-config \
    '{"kv_connector":"MooncakeKVConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'"""

SGLANG = r"""sglang serve --model-path MODEL --page-size 64 \
    --enable-hierarchical-cache --hicache-storage-backend mooncake_connector"""

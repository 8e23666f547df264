"""Pages between the pool and KV blocks on a GPU: slots of device memory, one copy a page, one kernel a batch."""

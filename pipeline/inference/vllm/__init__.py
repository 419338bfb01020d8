"""The code that runs inside vLLM's processes: the plugin and its patches, the middleware, the receiving ends of weight
sync."""

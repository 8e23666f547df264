"""Device memory: the CUDA driver, copies of pieces, and the transport between processes of one host."""

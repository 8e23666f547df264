"""Other hosts by RDMA: the receiver's card reads the sender's memory."""

"""Facts about this machine's network: interfaces, names, ports, packet filter, RDMA."""

"""The network as this machine sees it: interfaces, names, ports, packet filter, RDMA."""

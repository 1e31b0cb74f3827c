"""Several hosts on one machine: network namespaces joined by a link of limited rate."""

"""Jobs under faults, compared with the same jobs without: scenarios, a runner and a judge."""

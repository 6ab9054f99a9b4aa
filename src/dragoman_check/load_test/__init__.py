"""Load tests of servers: closed and open loops over every protocol, percentiles, comparison and a plot."""

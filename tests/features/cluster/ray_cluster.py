"""A Ray cluster of several nodes on this machine, in a process that reads commands and prints a line for each.

`add CPUS` prints the number of a node, `remove NUMBER` ends it, `kill NUMBER` kills its raylet as the loss of a host
does, with its workers.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster


def with_descendants(pid: int) -> list[int]:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [pid, *(found for child in children for found in with_descendants(child))]


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes: list[Any] = []
    print(cluster.address, file=sys.stderr, flush=True)
    for line in sys.stdin:
        command, argument = line.split()
        if command == "add":
            nodes.append(cluster.add_node(num_cpus=float(argument), resources={f"node{len(nodes)}": 1}))
        else:
            node = nodes[int(argument)]
            if command == "kill":
                (raylet,) = node.all_processes["raylet"]
                for pid in with_descendants(raylet.process.pid):
                    os.kill(pid, signal.SIGKILL)
            else:
                cluster.remove_node(node)
        print(len(nodes) - 1, file=sys.stderr, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

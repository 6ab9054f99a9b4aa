"""Install other servers and text engines, each into its own environment below benchmarks/results/venvs.

usage: python -m benchmarks.peers install mlserver litserve vllm openvino-genai ...
       python -m benchmarks.peers list
"""

import argparse

from benchmarks.peers import PEERS, install, installed_engines, installed_peers, version
from benchmarks.peers.engines import ENGINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("install", "list"))
    parser.add_argument("names", nargs="*", choices=[*PEERS, *ENGINES, []], help="default: all servers")
    options = parser.parse_args()
    if options.command == "install":
        for name in options.names or PEERS:
            install(name)
    for name in [*installed_peers(), *installed_engines()]:
        print(f"{name} {version(name)}")


if __name__ == "__main__":
    main()

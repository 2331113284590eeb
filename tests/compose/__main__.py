"""python -m tests.compose --kills 16: several gateways behind the proxy, and several rollout servers.

The images have to be there: `docker compose build`. First the demo's agent plays until the model has learned.
Then containers are killed while other agents play, and the system is audited. At the end the project and its
volumes are removed.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from tests.compose.run import kill_containers
from tests.compose.system import compose_system
from tests.support.serving import free_port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--rollout-servers", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=1024, help="of the demo's agent; 0: it does not play")
    parser.add_argument("--project", default="weir-scaled")
    parser.add_argument("--port", type=int, default=0, help="of the proxy on loopback; 0: a free one")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = Path("run/compose") / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    port = asked.port or free_port()
    with compose_system(asked.project, port, asked.gateways, asked.rollout_servers) as system:
        logging.info("%d containers are healthy", len(system.containers()))
        if asked.episodes:
            # Without --no-deps, compose goes back to one gateway.
            agent = ("run", "--rm", "-T", "--no-deps", "agent", "python", "-m", "weir.demo.agent_main")
            out = system.compose("--profile", "demo", *agent, "--episodes", str(asked.episodes))
            (folder / "demo.json").write_text(out, encoding="utf-8")
            logging.info("the demo's agent: %s", " ".join(out.split()))
        run = kill_containers(system, folder / "answers.jsonl", asked.kills, asked.seed, logging.info)
    logging.info("kills %s; the agents counted %s", run.killed, run.counts)
    sys.stdout.write(run.audit)
    sys.exit(0 if run.clean else 1)


if __name__ == "__main__":
    main()

"""The same in a module that cannot be copied: it has a thread, without which no step ends."""

import threading
from queue import SimpleQueue

from tests.support.environments import fates
from tests.support.environments.toys import Ending

asked, said = SimpleQueue[str](), SimpleQueue[str]()


def work() -> None:
    while True:
        said.put(asked.get())


threading.Thread(target=work, daemon=True).start()


class Fates(fates.Fates):
    def step(self, answer: str) -> Ending:
        asked.put(answer)
        return super().step(said.get())

"""Two hosts on this machine: network namespaces with a cable between them. Needs root and iproute2."""

import contextlib
import os
import subprocess

LEARNER_ADDRESS, ENVS_ADDRESS = "10.213.77.1", "10.213.77.2"


class Hosts:
    """Two network namespaces, `learner` and `envs`; each is a command that runs another one in it."""

    def __init__(self):
        names = [f"beast-{host}-{os.getpid()}" for host in ("learner", "envs")]
        self._names = names
        self.ends = [f"beast{os.getpid() % 100_000}{end}" for end in "ab"]  # of the cable: the learner's, the other
        self.learner, self.envs = (["ip", "netns", "exec", name] for name in names)
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for name, end, address in zip(names, self.ends, (LEARNER_ADDRESS, ENVS_ADDRESS)):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    @contextlib.contextmanager
    def cut(self):
        """The cable is out of its socket meanwhile."""
        for state in ("down", "up"):
            _ip("-n", self._names[1], "link", "set", self.ends[1], state)
            if state == "down":
                yield

    def close(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", self.ends[0]], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

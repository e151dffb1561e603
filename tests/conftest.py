"""What holds for all tests: Ctrl-C works, torch takes one core, and a program's main() can be called here."""

import os
import signal
import subprocess
import sys

import pytest

# A shell ignores Ctrl-C for what it starts in the background, as nohup does SIGHUP, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Tests run side by side, and so do the processes that they start. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as `import beast` does, before a test imports grpc


def pytest_configure(config):
    """Only `pytest tests/test_gpu.py` sees a GPU: all other tests are written for a CPU."""
    if any("test_gpu" not in argument for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """The README's commands take longest, one after the other: they come first, and the second worker has the rest."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture
def run_main(monkeypatch, capfd):
    """`run_main(module, *arguments)`: exit code and output of its main() with this command line, without another
    interpreter."""

    def run(module, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
        capfd.readouterr()
        code: object = 0
        try:
            module.main()
        except SystemExit as exited:
            code = exited.code or 0
        if not isinstance(code, int):  # an interpreter prints it and exits with 1
            print(code, file=sys.stderr)
            code = 1
        return code, "".join(capfd.readouterr())

    return run


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("sesame\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate of this machine and its key: two files."""
    from env_hosts import make_certificate

    return make_certificate(tmp_path_factory.mktemp("certificate"), "DNS:localhost,IP:127.0.0.1")


@pytest.fixture
def unix(tmp_path):
    """An address for a learner to listen on."""
    return f"unix:{tmp_path / 'learner'}"


@pytest.fixture
def quick(monkeypatch):
    """An env server that dials makes no pauses between two calls."""
    from beast.hosts import dialer

    monkeypatch.setattr(dialer, "PAUSE", (0.01, 0.02))
    monkeypatch.setattr(dialer, "FULL_PAUSE", (0.01, 0.02))


@pytest.fixture(scope="module")
def hosts():
    """Two hosts with a cable between them."""
    from namespaces import Hosts

    hosts = None
    try:
        hosts = Hosts()
        subprocess.run([*hosts.learner, "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no `ip` command to make network namespaces with (Linux: iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    else:
        yield hosts
    finally:
        if hosts:
            hosts.close()

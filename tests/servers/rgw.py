"""A real S3 server for tests: Ceph's gateway (RGW), one monitor and one OSD, all in memory.

Theory of operation. Debian's packages are enough (``radosgw``, ``ceph-mon``, ``ceph-osd``,
``ceph-common``); no cluster manager, no authentication inside, no root. All files lie in one
temporary directory, all daemons listen on 127.0.0.1 only, and each is a child of this process: it
is told to end when the tests end, is killed if it does not, and ends by itself if this process dies
(or the thread that started it). It takes some ten seconds until the gateway answers.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.servers.server import SMALL_PART_BYTES, S3Server

PROGRAMS = ("monmaptool", "ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "setpriv")
START_TIMEOUT_SECONDS = 60
STOP_TIMEOUT_SECONDS = 5
REGION = "default"


def available() -> str:
    """Why the gateway cannot be started here, in one line; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return ""
    return f"no {', '.join(missing)} on this machine (apt-get install radosgw ceph-mon ceph-osd ceph-common)"


@contextlib.contextmanager
def running_rgw(memory_bytes: int = 3 * 2**30) -> Iterator[S3Server]:
    """A gateway without buckets, for as long as the block lasts.

    Raises ``RuntimeError`` with the end of the log.
    """
    folder = Path(tempfile.mkdtemp(prefix="rgw-"))
    children: list[subprocess.Popen[bytes]] = []
    try:
        yield _start(folder, memory_bytes, children)
    finally:
        _stop(children)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, memory_bytes: int, children: list[subprocess.Popen[bytes]]) -> S3Server:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    cluster_id, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
    ports = _free_ports(3)
    configuration = folder / "ceph.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            folder=folder, id=cluster_id, ports=ports, memory_bytes=memory_bytes, part_bytes=SMALL_PART_BYTES
        )
    )
    for daemon in ("mon", "osd", "rgw"):
        (folder / daemon).mkdir()
    program = ("--conf", str(configuration))
    address = f"[v2:127.0.0.1:{ports[0]}/0,v1:127.0.0.1:{ports[1]}/0]"
    monmap = str(folder / "monmap")

    def run(*command: str) -> None:
        left = max(1.0, deadline - time.monotonic())
        done = subprocess.run(command, capture_output=True, timeout=left, cwd=folder, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")

    def start(*command: str) -> None:
        log = folder / f"{command[0]}.log"
        with log.open("wb") as output:
            # The child ends with us, also when we are killed.
            children.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command, "--foreground"],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=folder,
                )
            )

    run("monmaptool", "--create", "--fsid", cluster_id, "--addv", "a", address, "--clobber", monmap)
    run("ceph-mon", *program, "--id", "a", "--mkfs", "--monmap", monmap)
    start("ceph-mon", *program, "--id", "a")
    run("ceph", *program, "osd", "new", osd_id)
    run("ceph-osd", *program, "--id", "0", "--mkfs", "--osd-uuid", osd_id)
    start("ceph-osd", *program, "--id", "0")
    start("radosgw", *program, "--name", "client.rgw")
    _wait_for_answer(ports[2], deadline, children, folder)
    key, secret = secrets.token_hex(10), secrets.token_hex(20)
    user = ("user", "create", "--uid", "tests", "--display-name", "tests", "--access-key", key, "--secret-key", secret)
    run("radosgw-admin", *program, "--name", "client.rgw", *user)
    return S3Server(f"http://127.0.0.1:{ports[2]}", key, secret, REGION)


def _wait_for_answer(port: int, deadline: float, children: list[subprocess.Popen[bytes]], folder: Path) -> None:
    while True:
        ended = [child.args for child in children if child.poll() is not None]
        late = time.monotonic() > deadline
        if ended or late:
            logs = [log.read_text(errors="replace")[-1000:] for log in sorted(folder.glob("*.log"))]
            raise RuntimeError(f"the gateway does not answer; ended: {ended}; " + "\n".join(logs))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
        else:
            return
        finally:
            connection.close()


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    # Nothing of it is wanted again, so nobody waits for a clean shutdown, which takes the gateway
    # seconds.
    for child in reversed(children):
        child.kill()
    for child in children:
        child.wait(timeout=STOP_TIMEOUT_SECONDS)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


_CONFIGURATION = """
[global]
fsid = {id}
mon_host = [v2:127.0.0.1:{ports[0]}/0,v1:127.0.0.1:{ports[1]}/0]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = {memory_bytes}
osd_class_load_list = *
osd_class_default_list = *
mon_allow_pool_size_one = true
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
run_dir = {folder}
admin_socket = {folder}/$name.asok
pid_file =
log_file =
log_to_file = false
log_to_stderr = true
err_to_stderr = true
mon_cluster_log_to_file = false

[client.rgw]
# Without it every answer to a GET waits some 40 ms, for an acknowledgement that the client delays.
rgw_frontends = beast endpoint=127.0.0.1:{ports[2]} tcp_nodelay=1
ms_mon_client_mode = crc
# What is deleted is freed soon, not in two hours: the objects live in memory.
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 10
rgw_enable_usage_log = false
rgw_multipart_min_part_size = {part_bytes}
"""

"""dtlayout web: only this machine and this page are answered, and only about the page's own files and questions."""

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dtlayout.base.errors import DtlayoutError
from dtlayout.cli import main
from dtlayout.commands.ask import ask
from dtlayout.web.server import PageServer, read_static

FIRST = {"model": "llama3.1-8b", "gpu": "h100-80g-sxm", "gpus": "64", "seq_len": "8192", "global_batch": "512"}
"""The question of a fresh page."""
QUESTION = {"model": "debug", "gpu": "cpu", "gpus": 4, "seq_len": 64, "global_batch": 8}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(ask, token="the-token") as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def send(server: PageServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict, bytes]:
    """Status, headers and content of what answers a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    own = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, own)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def host(server: PageServer) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


def test_the_page_and_its_files_are_sent_with_headers_that_let_it_load_nothing_else(server):
    for name, file in read_static().items():
        status, headers, content = send(server, "GET", f"/the-token/{name}")
        assert (status, content) == (200, file.content)
        assert headers["content-type"] == f"{file.type}; charset=utf-8"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers and headers["cache-control"] == "no-store"


def test_a_question_is_answered(server):
    body = json.dumps(QUESTION).encode()
    status, headers, content = send(server, "POST", "/the-token/ask", body, Content_Type="application/json")
    assert status == 200 and headers["content-type"] == "application/json"
    assert json.loads(content) == ask(QUESTION)


@pytest.mark.parametrize(
    "path", ["/", "", "/the-token", "/other/", "/the-tokem/", "//", "/the-token/../the-token/nothing", "/ask", "/%00/"]
)
def test_without_the_token_there_is_nothing(server, path):
    for method in ("GET", "POST"):
        status, _, content = send(server, method, path or "/", b"{}", Content_Type="application/json")
        assert (status, content) == (404, b"Not Found\n")


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.evil.example:{port}",
     "192.168.0.1:{port}", "0.0.0.0:{port}", "127.0.0.1", "[::1].evil:{port}", "", "user@127.0.0.1@evil:{port}"],
)  # fmt: skip
def test_another_name_of_this_host_is_refused_as_a_rebound_one_would_be(server, name):
    named = name.format(port=server.server_address[1])
    for method, path in (("GET", "/the-token/"), ("POST", "/the-token/ask")):
        assert send(server, method, path, b"{}", Host=named, Content_Type="application/json")[0] == 403


def test_two_names_of_a_host_are_refused(server):
    with socket.create_connection(server.server_address) as connection:
        connection.sendall(f"GET /the-token/ HTTP/1.1\r\nHost: {host(server)}\r\nHost: evil.example\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("name", ["localhost:9000", "[::1]:9000", "127.0.0.1:1"])
def test_a_forwarded_port_may_have_another_number(server, name):
    assert send(server, "GET", "/the-token/", Host=name, Origin=f"http://{name}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "https://{host}"}, {"Origin": "http://localhost:1"},
        {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://{host}", "Sec_Fetch_Site": "cross-site"},
    ],
)  # fmt: skip
def test_pages_of_others_are_refused_even_with_the_token(server, headers):
    headers = {name: value.format(host=host(server)) for name, value in headers.items()}
    body = json.dumps(QUESTION).encode()
    status, _, content = send(server, "POST", "/the-token/ask", body, Content_Type="application/json", **headers)
    assert (status, content) == (403, b"Forbidden\n")
    assert send(server, "GET", "/the-token/", **headers)[0] == 403


def test_the_page_itself_is_answered(server):
    headers = {"Origin": f"http://{host(server)}", "Sec_Fetch_Site": "same-origin", "Content_Type": "application/json"}
    assert send(server, "POST", "/the-token/ask", json.dumps(QUESTION).encode(), **headers)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_type_that_any_page_may_send_is_refused(server, kind):
    assert send(server, "POST", "/the-token/ask", b"{}", Content_Type=kind)[0] == 415


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "GETT"])
def test_no_other_method_is_known(server, method):
    status, headers, _ = send(server, method, "/the-token/ask")
    assert status == 501 and not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize(
    "path",
    ["../server.py", "..%2fserver.py", "static/index.html", "/etc/passwd", "%2e%2e/%2e%2e/pyproject.toml", "ask",
     "index.html/", "__init__.py", "page.css/../index.html", "\\..\\server.py"],
)  # fmt: skip
def test_no_path_leads_to_another_file(server, path):
    assert send(server, "GET", f"/the-token/{path}")[0] == 404


def test_only_questions_are_posted(server):
    for path in ("", "index.html", "ask/", "other"):
        assert send(server, "POST", f"/the-token/{path}", b"{}", Content_Type="application/json")[0] == 404


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"a": NaN'])
def test_what_is_no_json_is_refused(server, body):
    status = send(
        server, "POST", "/the-token/ask", body, Content_Type="application/json", Content_Length=str(len(body))
    )
    assert status[0] == 400


TOO_LONG = ("1000001", 413), ("99999999999999999999", 413)
NO_LENGTH = ("-1", 411), ("many", 411), ("²", 411)


@pytest.mark.parametrize("length, status", [*TOO_LONG, *NO_LENGTH])
def test_sizes_are_limited_before_anything_is_read(server, length, status):
    with socket.create_connection(server.server_address) as connection:
        head = f"POST /the-token/ask HTTP/1.1\r\nHost: {host(server)}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode("latin-1", "replace"))
        answer = connection.recv(4096)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"Connection: close" in answer


def test_a_body_without_a_length_is_refused(server):
    with socket.create_connection(server.server_address) as connection:
        head = f"POST /the-token/ask HTTP/1.1\r\nHost: {host(server)}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 411 ")


def test_headers_are_limited(server):
    with socket.create_connection(server.server_address) as connection:
        connection.sendall(f"GET /{'a' * 70_000} HTTP/1.1\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 414 ")
    with socket.create_connection(server.server_address) as connection:
        lines = "".join(f"X-{i}: 1\r\n" for i in range(200))
        connection.sendall(f"GET /the-token/ HTTP/1.1\r\nHost: {host(server)}\r\n{lines}\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_while_one_client_says_nothing_others_are_answered(server):
    with socket.create_connection(server.server_address) as silent:
        silent.sendall(b"GET /the-token/ HTTP/1.1\r\n")
        assert send(server, "GET", "/the-token/")[0] == 200


def test_a_bug_of_the_planner_ends_one_question_alone(capsys):
    def fail(question):
        return ask(question) if question.get("gpus") else {}["gpus"]

    with PageServer(fail, token="the-token") as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        for body, status in ((b"{}", 500), (json.dumps(QUESTION).encode(), 200)):
            assert send(served, "POST", "/the-token/ask", body, Content_Type="application/json")[0] == status
        served.shutdown()
    assert "KeyError: 'gpus'" in capsys.readouterr().err


def test_it_listens_on_loopback_alone_and_every_start_has_its_own_token():
    with PageServer(ask) as one, PageServer(ask) as other:
        assert one.server_address[0] == other.server_address[0] == "127.0.0.1"
        assert one.token != other.token and len(one.token) >= 32
        assert one.address == f"http://127.0.0.1:{one.server_address[1]}/{one.token}/"
        with pytest.raises(DtlayoutError, match=f"port {one.server_address[1]} cannot be had: Address already in use"):
            PageServer(ask, one.server_address[1])


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_is_none_is_refused(capsys, port):
    assert main(["web", "--no-browser", f"--port={port}"]) == 2
    assert capsys.readouterr().err == f"--port={port} must lie from 0 to 65535\n"


def test_the_command_answers_soon_and_ctrl_c_ends_it():
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "dtlayout.cli", "web", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32,})/", address)
        assert found, address
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        for changed in ({}, {"gpus": "32"}, {"ask": "explain", "layout": "dp64 mb1 zero3"}):
            connection.request("POST", f"/{found[2]}/ask", json.dumps(FIRST | changed), JSON)
            assert json.loads(connection.getresponse().read())["ok"]
        assert time.monotonic() - began < 30  # a machine may be busy; docs/guide/web.md has the usual time
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == "stopped\n"
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Two answers and an opened layout of 8B on 64 GPUs, with the start: some 2 s of a core that is not shared.
        assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 8
    finally:
        process.kill()
        process.wait()

"""A small server that speaks OpenAI's chat protocol, and fails in the ways that servers do."""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


class ChatServer:
    """
    Answers each chat with `answer(body)`; before that, the failures of the script are played, one a request.

    Failures: an HTTP status (`int`), `"timeout"`, `"malformed"` (broken JSON), `"empty"` (JSON of another kind),
    `"hang up"`.
    """

    def __init__(self, failures=(), answer=None):
        self.failures, self.answer = list(failures), answer or self.echo
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self._lock = Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    failure = server.failures.pop(0) if server.failures else None
                server.reply(self, body, failure)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def reply(self, handler, body, failure):
        status, text = 200, ""
        if failure == "hang up":
            handler.close_connection = True
            return
        if failure == "timeout":
            time.sleep(0.6)
        if isinstance(failure, int):
            status, text = failure, json.dumps({"error": {"message": f"failure {failure}"}})
        elif failure == "malformed":
            text = '{"choices": [{"mess'
        elif failure == "empty":
            text = '{"object": "list", "data": []}'
        else:
            answer = self.answer(body)
            if isinstance(answer, int):
                status, text = answer, json.dumps({"error": {"message": f"failure {answer}"}})
            else:
                text = json.dumps(answer)
        try:
            handler.send_response(status)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text.encode())
        except OSError:  # a client that waits no longer
            pass

    @staticmethod
    def message(message, finish_reason="stop", **more):
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice | more]}

    @classmethod
    def echo(cls, body):
        return cls.message({"content": f"You said: {body['messages'][-1]['content']}"})

    def __enter__(self):
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

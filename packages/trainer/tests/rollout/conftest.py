"""A small OpenAI-compatible completions server that runs a transformers model, for tests."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM


class CompletionsServer:
    """Serves ``/v1/completions`` and ``/update_weights_from_disk``; samples token by token, without a cache."""

    def __init__(self, model, style="vllm", decode=None):
        self.model = model
        self.decode = decode
        self.style = style
        self.requests = []
        self.loaded = []
        self.change = lambda answer: answer
        self._lock = threading.Lock()

    def answer(self, path, body):
        with self._lock:
            if path == "/update_weights_from_disk":
                self.model = AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=torch.float32).eval()
                self.loaded.append(body["model_path"])
                return {"success": True, "message": "ok"}
            assert path == "/v1/completions"
            self.requests.append(body)
            return self.change({"object": "text_completion", "choices": [self._complete(body)]})

    @torch.no_grad()
    def _complete(self, body):
        generator = torch.Generator().manual_seed(body["seed"])
        ids, tokens, log_probs, reason, matched = list(body["prompt"]), [], [], "length", None
        while len(tokens) < body["max_tokens"]:
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            scaled = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
            if body["temperature"]:
                token = int(torch.multinomial(scaled.exp(), 1, generator=generator))
            else:
                token = int(scaled.argmax())
            ids.append(token)
            tokens.append(token)
            log_probs.append(float(scaled[token]))
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
            matched = next((text for text in body.get("stop", ()) if text in self.decode(tokens)), None)
            if matched:
                reason = "stop"
                break
        choice = {"index": 0, "text": "", "finish_reason": reason, "logprobs": {"token_logprobs": log_probs}}
        choice["logprobs"]["tokens"] = [f"token_id:{token}" for token in tokens]
        if self.style == "vllm":
            choice |= {"token_ids": tokens, "stop_reason": matched}
        elif self.style == "sglang":
            choice |= {"response_token_ids": tokens, "matched_stop": matched}
        return choice


@pytest.fixture(scope="session")
def serving():
    """``with serving(model) as (server, url)``."""
    return _serving


@contextmanager
def _serving(model, **options):
    """The server and its address."""
    state = CompletionsServer(model, **options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(state.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

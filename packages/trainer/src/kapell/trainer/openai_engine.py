"""Samples from a server with an OpenAI-compatible completions endpoint, as vLLM and SGLang have it."""

# B rows, P padded prompt tokens, T response tokens

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests
import torch

from .http_service import HttpService, ServiceError
from .rollout_engine import RolloutRequest
from .sampler import Rollout

__all__ = ["OpenAIEngine"]

_COMPLETIONS = "/v1/completions"
_TOKEN_ID = "token_id:"  # what vLLM's return_tokens_as_token_ids writes before the number


@dataclass(frozen=True, kw_only=True)
class OpenAIEngine(HttpService):
    """A rollout engine over HTTP: one request per row, with token ids in and out, so that nothing is tokenized twice.

    The server must return token ids with its log-probabilities: it is asked by ``return_token_ids`` (SGLang, vLLM) and
    by ``return_tokens_as_token_ids`` (vLLM). Its log-probabilities must be those at the sampling temperature, before
    top-k and top-p: with a temperature other than 1, start vLLM with ``--logprobs-mode processed_logprobs`` and leave
    top-k and top-p off; ``training/rollout_log_probs_diff_max`` shows how far they are from the trainer's own.

    Stop strings are sent as ``stop``. The server must say which one ended a response (``stop_reason`` of vLLM,
    ``matched_stop`` of SGLang) and return its tokens too.
    """

    model: str
    """The model's name on the server."""
    eos_token_ids: Collection[int]
    """Tokens that end a response."""
    pad_token_id: int
    """Fills what follows."""
    reload_path: str | None = None
    """Path to which ``{"model_path": folder}`` is posted when the policy has changed, such as SGLang's
    ``/update_weights_from_disk``; the server reads that folder. Null: it keeps the weights it was started with."""

    def generate(self, request: RolloutRequest) -> Rollout:
        """A response for each row. Raises `ServiceError` when the server fails or leaves out what training needs."""
        num_rows, length = len(request.prompts), request.max_new_tokens
        responses_BT = torch.full((num_rows, length), self.pad_token_id, dtype=torch.long)
        mask_BT = torch.zeros_like(responses_BT)
        log_probs_BT = torch.zeros((num_rows, length))
        bodies = [self._body(request, row) for row in range(num_rows)]
        with self.session() as session, ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for row, (tokens, log_probs) in enumerate(pool.map(lambda body: self._complete(session, body), bodies)):
                    responses_BT[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
                    log_probs_BT[row, : len(tokens)] = torch.tensor(log_probs)
                    mask_BT[row, : len(tokens)] = 1
            finally:
                pool.shutdown(cancel_futures=True)
        return Rollout(responses_BT, mask_BT, log_probs_BT)

    def load_weights(self, folder: str) -> None:
        """Let the server read the weights in a folder, where ``reload_path`` says how."""
        if self.reload_path is None:
            return
        with self.session() as session:
            answer = self.post(session, {"model_path": folder}, self.reload_path)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise ServiceError(f"{self.url}{self.reload_path} could not load {folder}: {answer.get('message')}")

    def _body(self, request: RolloutRequest, row: int) -> dict[str, Any]:
        sampling = request.sampling
        prompt = request.prompts[row][request.prompt_mask[row].bool()].tolist()
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature if sampling.do_sample else 0.0,
            "top_p": sampling.top_p if sampling.do_sample else 1.0,
            "logprobs": 1,
            "seed": _row_seed(request.seed, request.step, request.sample_ids[row]),
            "stop_token_ids": sorted(self.eos_token_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if sampling.do_sample and sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return body

    def _complete(self, session: requests.Session, body: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Token ids and log-probabilities of one response."""
        answer = self.post(session, body, _COMPLETIONS)
        try:
            choice = answer["choices"][0]
            tokens, log_probs = _tokens_of(choice), [float(value) for value in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ServiceError(f"{self.url} answered no completion with token ids and logprobs ({reason})") from error
        if len(tokens) != len(log_probs) or not 0 < len(tokens) <= body["max_tokens"]:
            raise ServiceError(
                f"{self.url} answered {len(tokens)} tokens and {len(log_probs)} logprobs; need as many of both, and "
                f"between 1 and {body['max_tokens']}"
            )
        if not all(map(math.isfinite, log_probs)):
            raise ServiceError(f"{self.url} answered logprobs that are not finite: {log_probs}")
        ended = tokens[-1] in self.eos_token_ids or _stop_string_of(choice) in body.get("stop", ())
        if not ended and len(tokens) < body["max_tokens"]:
            raise ServiceError(
                f"{self.url} answered {len(tokens)} of {body['max_tokens']} tokens without an end-of-sequence token "
                f"(finish_reason {choice.get('finish_reason')!r}, stop string {_stop_string_of(choice)!r}); training "
                "needs that token and its log-probability"
            )
        return tokens, log_probs


def _stop_string_of(choice: Mapping[str, Any]) -> object:
    """The stop string that ended a completion, by the field of vLLM or of SGLang; None if none did."""
    return choice.get("stop_reason", choice.get("matched_stop"))


def _tokens_of(choice: Mapping[str, Any]) -> list[int]:
    for name in ("token_ids", "response_token_ids"):
        if choice.get(name) is not None:
            return [int(token) for token in choice[name]]
    tokens: Sequence[str] = choice["logprobs"]["tokens"]
    if not all(token.startswith(_TOKEN_ID) for token in tokens):
        raise ValueError("tokens came as text only, which cannot be turned back into ids without guessing")
    return [int(token.removeprefix(_TOKEN_ID)) for token in tokens]


def _row_seed(seed: int, step: int, sample_id: int) -> int:
    """A seed of 31 bits that depends on all three and on nothing else."""
    return int(np.random.SeedSequence((seed, step, sample_id)).generate_state(1)[0]) & 0x7FFFFFFF

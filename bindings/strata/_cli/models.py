"""The causal language model that `--model` names: a saved folder, a config.json, or a size.

choice = choose("llama-110m", vocabulary=8192)
model = choice.build()                       # on the meta device
strata.wrap(model, ..., weights=choice.weights or "init")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from .._config.choices import MODEL_SIZES
from .._errors import nearest

VOCABULARY = 8192  # of a fresh model, where nothing else is asked for


@dataclass(frozen=True)
class Choice:
    """A model that is not built yet. `weights` None: a fresh one."""

    name: str
    config: Any
    weights: Path | None
    tokenizer: Path | None
    trusted: bool = False  # code that comes with it may run
    config_path: Path | None = None  # the file that describes it

    def build(self) -> nn.Module:
        """The model, on the meta device: no parameter has memory yet."""
        with torch.device("meta"):
            return build(self.config, dtype=torch.float32, trust_remote_code=self.trusted)

    def adopt(self, tokenizer: Any) -> None:
        """Makes the special tokens of a fresh model those of its tokenizer.

        The padding token stays unset: Transformers would never train its embedding, which here is
        that of the end of the text.
        """
        if self.weights is None:
            self.config.bos_token_id = tokenizer.bos_token_id
            self.config.eos_token_id = tokenizer.eos_token_id
            self.config.pad_token_id = None

    def load_tokenizer(self) -> Any | None:
        """The model's own tokenizer, or None where one must be trained."""
        if self.tokenizer is None:
            return None
        with _plain_refusals(f"the tokenizer in {self.tokenizer} cannot be read"):
            return AutoTokenizer.from_pretrained(self.tokenizer, trust_remote_code=self.trusted)


def choose(
    name: str, vocabulary: int | None, positions: int, trusted: bool | None = False
) -> Choice:
    """Finds the model. `positions`: the longest sequence that a fresh named one will see.
    `trusted`: code that comes with the model may run; None: no option would let it.

    Raises ValueError, naming the nearest valid name, for what is neither a folder, a file nor a
    size, and for a folder or file that holds no causal language model.
    """
    path = Path(name)
    if name in MODEL_SIZES:
        shape = MODEL_SIZES[name]
        config = llama_config(shape, vocabulary or VOCABULARY, max(2048, positions))
        return Choice(name, config, None, None)
    if path.is_file():
        config = _config(path, trusted)
        if vocabulary is not None:
            config.vocab_size = vocabulary
        tokenizer = _tokenizer_in(path.parent)
        return Choice(path.parent.name or name, config, None, tokenizer, bool(trusted), path)
    if path.is_dir():
        return _saved(path, vocabulary, trusted)
    raise ValueError(
        f"--model {name!r} is neither a folder, nor a config.json, nor a size: "
        + nearest(name, MODEL_SIZES)
    )


def config_file(folder: Path) -> Path:
    """The configuration in a save_pretrained folder. Raises ValueError where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a save_pretrained folder")
    return file


def build(config: Any, **options: Any) -> nn.Module:
    """The model of a configuration, where torch makes tensors now. Raises ValueError, with the file
    that it was read from, where Transformers cannot make one of it."""
    file = config.name_or_path or f"this configuration of {config.model_type}"
    with _plain_refusals(f"no model can be made of {file}"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, **options)
    return model


def put_on_host(model: nn.Module) -> None:
    """A model of the meta device as one of the host that has no memory either. Call inside a
    FakeTensorMode."""
    made: dict[int, torch.Tensor] = {}  # what is tied stays so
    for module in model.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                tensors[name] = made[id(tensor)]


@contextmanager
def _plain_refusals(what: str) -> Iterator[None]:
    """Around what Transformers does with a configuration: a bad value, which may lead to any
    exception, becomes a ValueError of one line that begins with `what`."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        # Its checks of fields raise around what says what is wrong.
        cause = error.__cause__ if type(error).__name__.startswith("StrictDataclass") else None
        why = " ".join(str(cause or error).split())
        # By itself "'foo'", which a KeyError says, would not be understood.
        if cause is None and not isinstance(error, ValueError | TypeError | OSError | RuntimeError):
            why = f"{type(error).__name__}: {why}"
        raise ValueError(f"{what}: {why}") from error


def _saved(path: Path, vocabulary: int | None, trusted: bool | None) -> Choice:
    config = config_file(path)
    if not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} has no *.safetensors weights; for a fresh model give its {config}"
        )
    if vocabulary is not None:
        raise ValueError("--vocabulary is for a fresh model; a saved one keeps its own")
    tokenizer = _tokenizer_in(path)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer beside its weights")
    found = _config(config, trusted)
    found.name_or_path = str(path)  # what adapters remember as their base
    return Choice(path.resolve().name, found, path, tokenizer, bool(trusted), config)


def _config(file: Path, trusted: bool | None) -> Any:
    own_code = '"auto_map"' in file.read_text(errors="replace")
    if own_code and not trusted:
        way = (
            "--trust-remote-code runs it"
            if trusted is not None
            else "this command runs none; strata.plan() takes a model that you have built"
        )
        raise ValueError(f"{file} describes a model with code of its own: {way}")
    place = file.parent if own_code else file  # code lies beside it
    with _plain_refusals(f"{file} does not describe a model of Transformers"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=bool(trusted))
    _check_counts(config, file)
    if not own_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{file}: {config.model_type!r} is not a causal language model")
    return config


# Transformers' names of what every causal language model with such a thing has at least one of.
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
)


def _check_counts(config: Any, file: Path) -> None:
    """Raises ValueError for numbers of parts that no model can have: Transformers makes of a
    negative number of layers a model without any."""
    text = config.get_text_config()
    least = {name: 0 for name in text.to_dict() if name.startswith(("num_", "n_"))}
    for name, low in (least | dict.fromkeys(COUNTS, 1)).items():
        value = getattr(text, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value < low:
            raise ValueError(f"{file}: {name} is {value}, and has to be {low} at least")


def _tokenizer_in(folder: Path) -> Path | None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return folder if any((folder / name).is_file() for name in names) else None


def llama_config(shape: tuple[int, int, int, int], vocabulary: int, positions: int) -> LlamaConfig:
    """Of a Llama of these sizes (hidden, layers, heads, intermediate), with a head of its own."""
    hidden, layers, heads, intermediate = shape
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )

"""Model cards: architecture, training data, measurements, and how to load the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualres.config.plugins import REGISTERED
from dualres.model.accounting import parameters
from dualres.model.decoder import Decoder
from dualres.util.optional_dependencies import install
from dualres.util.templates import environment
from dualres.util.version import VERSION


def card(
    title: str,
    decoder: Decoder,
    origin: Sequence[str],
    measurements: Mapping[str, Any],
    folder: str,
    form: str = "dualres",
) -> str:
    """Markdown with the front matter for the Hub. `origin`: paragraphs about where the weights come from.

    `form` is dualres or llama; transformers has the code of the latter.
    """
    template = environment(Path(__file__).parent / "templates", escape=str).get_template("model_card.md")
    return template.render(
        title=title,
        model=decoder.config,
        residual=decoder.residual_config,
        count=parameters(decoder),
        origin=origin,
        measurements=measurements,
        folder=folder,
        form=form,
        plugin=REGISTERED.get(decoder.residual_config.method),
        install=install("hub"),
        version=VERSION,
    )

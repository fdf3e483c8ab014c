"""Self-attention, its positions and its kernels.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import (
    all_of,
    has_recent_transformer_engine,
    is_any,
    is_on_gpu,
    is_on_gpu_here,
    on,
    packs_documents,
    sees_later_tokens,
    without,
)
from .row import OurFeature, given, rows

ATTENTION = (
    *rows(
        OurFeature.SEGMENTS,
        {"--window-size with tokens after the query": all_of(on("window_size"), sees_later_tokens)},
        because="lets a segment attend to later ones, which have not been computed",
        way_out="give 0 as its second number",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {"--position-embedding-type mrope": is_any("position_embedding_type", "mrope")},
        because="is not cut into segments yet",
        way_out="use --position-embedding-type rope",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--qk-clip", "--log-max-attention-logit"),
        because="needs the largest logit of each head, which takes another product of all queries and keys",
        way_out="drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--attention-backend fused with --attention-dropout and --window-size on a GPU": all_of(
                is_any("attention_backend", "fused"), on("attention_dropout"), on("window_size"), is_on_gpu
            ),
            "--attention-backend fused with --attention-dropout and packed documents on a GPU": all_of(
                is_any("attention_backend", "fused"), on("attention_dropout"), packs_documents, is_on_gpu
            ),
        },
        because="has no kernel in Transformer Engine",
        way_out="drop --attention-dropout, or use --attention-backend flash",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--attention-backend fused on this GPU without Transformer Engine 2.20 or later": all_of(
                is_any("attention_backend", "fused"), is_on_gpu_here, without(has_recent_transformer_engine)
            )
        },
        because="needs it",
        way_out="install transformer-engine, or use --attention-backend flash",
    ),
)

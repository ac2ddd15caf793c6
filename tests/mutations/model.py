"""Bugs of layers, models and the loading of weights."""

from __future__ import annotations

from tests.mutations import Mutation

T = "tests/test_model.py::"
PLAIN = T + "test_logits_equal_plain_arithmetic"
ROTARY = "minisgl.layers.rotary"
NORM = "minisgl.layers.norm"
LINEAR = "minisgl.layers.linear"
ATTENTION = "minisgl.layers.attention"
BASE = "minisgl.models.base"
WEIGHTS = "minisgl.models.weights"

MUTATIONS = [
    Mutation(
        "rotary: turned the wrong way",
        ROTARY,
        "torch.cat((-sin, sin), dim=-1)",
        "torch.cat((sin, -sin), dim=-1)",
        T + "test_rotation_is_counted_from_the_first_half",
    ),
    Mutation(
        "rotary: neighbouring dimensions form a plane",
        ROTARY,
        "swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)",
        "swapped = x.roll(1, dims=-1)",
        PLAIN + "[default]",
    ),
    Mutation(
        "rotary: llama3 stretches the fast planes",
        ROTARY,
        "return inv_freq * keep + inv_freq / scaling.factor * (1 - keep)",
        "return inv_freq * (1 - keep) + inv_freq / scaling.factor * keep",
        PLAIN + "[llama3]",
    ),
    Mutation(
        "rotary: yarn without rounded bounds",
        ROTARY,
        "first, last = math.floor(first), math.ceil(last)",
        "pass",
        PLAIN + "[yarn]",
    ),
    Mutation(
        "rotary: yarn without the attention factor",
        ROTARY,
        "dim=-1).mul_(factor)",
        "dim=-1)",
        PLAIN + "[yarn]",
    ),
    Mutation(
        "rotary: the table is rounded to the dtype of the model",
        ROTARY,
        "return (x * cos).addcmul_(swapped, sin).to(x.dtype)",
        "return (x * cos.to(x.dtype)).addcmul_(swapped, sin.to(x.dtype))",
        T + "test_rotation_in_bfloat16_is_computed_in_float32",
    ),
    Mutation(
        "norm: the residual is replaced, not added to",
        NORM,
        "x = x + residual",
        "x = residual",
        PLAIN + "[mistral]",
    ),
    Mutation(
        "norm: keys are scaled by the weight of the queries",
        NORM,
        'f"{base}.k_norm.weight"',
        'f"{base}.q_norm.weight"',
        PLAIN + "[default]",
    ),
    Mutation(
        "linear: merged projections overwrite one another",
        LINEAR,
        "start += shard.size",
        "start += 0",
        PLAIN + "[mistral]",
    ),
    Mutation(
        "linear: every rank adds the bias",
        LINEAR,
        "held = bias and place.comm.rank == 0",
        "held = bias",
        "tests/test_tensor_parallel.py::test_bias_of_a_row_parallel_layer_is_added_once",
    ),
    Mutation(
        "linear: copies of a KV head go round instead of to neighbours",
        LINEAR,
        "first = comm.rank * heads // comm.size",
        "first = comm.rank % heads",
        "tests/test_tensor_parallel.py::test_pitfall_09_kv_heads_fewer_than_ranks[2-4]",
    ),
    Mutation(
        "embedding: foreign ids count too",
        "minisgl.layers.embedding",
        "vectors.mul_(mine.unsqueeze(-1))",
        "vectors",
        "tests/test_tensor_parallel.py::test_pitfall_09_lm_head_is_gathered_whole[7]",
    ),
    Mutation(
        "head: logits of the padding are handed out",
        "minisgl.layers.embedding",
        "return logits[:, : self.vocab_size]",
        "return logits",
        "tests/test_tensor_parallel.py::test_pitfall_09_lm_head_is_gathered_whole[7]",
    ),
    Mutation(
        "attention: keys stored as values",
        ATTENTION,
        "fb.attn.run(q, k, v, self.layer_id)",
        "fb.attn.run(q, k, k, self.layer_id)",
        PLAIN + "[mistral]",
    ),
    Mutation(
        "attention: queries and keys are not normalised",
        ATTENTION,
        "qk = self.qk_norm(qk)",
        "pass",
        PLAIN + "[default]",
    ),
    Mutation(
        "mlp: the gate is applied to itself",
        "minisgl.layers.mlp",
        "F.silu(gate).mul_(up)",
        "F.silu(gate).mul_(gate)",
        PLAIN + "[mistral]",
    ),
    Mutation(
        "model: the wrong rows reach the head",
        BASE,
        "x = x[fb.last_idx]",
        "x = x[fb.last_idx.flip(0)]",
        PLAIN + "[mistral]",
    ),
    Mutation(
        "qwen2: the bias is forgotten",
        "minisgl.models.qwen2",
        "AttentionStyle(qkv_bias=True)",
        "AttentionStyle()",
        PLAIN + "[yarn]",
    ),
    Mutation(
        "weights: a missing tensor stays zero",
        WEIGHTS,
        "if missing := sorted(wanted - checkpoint.file_of.keys()):",
        "if missing := []:",
        T + "test_missing_tensor_is_named",
    ),
    Mutation(
        "weights: an extra tensor is ignored",
        WEIGHTS,
        "extra.append(name)",
        "continue",
        T + "test_extra_tensor_is_named",
    ),
    Mutation(
        "weights: shapes are not compared",
        WEIGHTS,
        "if shape != piece.shape:",
        "if False:",
        T + "test_misshapen_tensor_is_named_with_both_shapes",
    ),
    Mutation(
        "weights: quantised numbers are taken for weights",
        WEIGHTS,
        "return None if dtype in FLOATS else",
        "return None if dtype else",
        T + "test_quantised_tensor_is_refused",
    ),
    Mutation(
        "weights: a tied head of its own is dropped in silence",
        WEIGHTS,
        "if not torch.equal(checkpoint.read(own), checkpoint.read(embedding)):",
        "if False:",
        T + "test_tied_head_with_other_values_is_refused",
    ),
    Mutation(
        "weights: loading unties the head",
        WEIGHTS,
        "if old not in made:",
        "if True:",
        T + "test_tied_head_shares_memory",
    ),
    Mutation(
        "weights: every rank reads the whole tensor",
        WEIGHTS,
        "get_slice(piece.name)[piece.source]",
        "get_slice(piece.name)[()]",
        "tests/test_tensor_parallel.py::test_logits_equal_one_rank[llama-2]",
    ),
]

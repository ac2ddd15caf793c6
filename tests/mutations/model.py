"""Bugs of layers, models and the loading of weights."""

from __future__ import annotations

from tests.mutations import Mutation

T = "tests/test_model.py::"
PLAIN = T + "test_logits_equal_plain_arithmetic"
ROTARY = "minisgl.layers.attention"
NORM = "minisgl.layers.attention"
LINEAR = "minisgl.layers.linear"
ATTENTION = "minisgl.layers.attention"
BASE = "minisgl.models.base"
SHARDS = "minisgl.models.shards"
SCALING = "minisgl.layers.rope_scaling"
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
        SCALING,
        "return inv_freq * keep + inv_freq / scaling.factor * (1 - keep)",
        "return inv_freq * (1 - keep) + inv_freq / scaling.factor * keep",
        PLAIN + "[llama3]",
    ),
    Mutation(
        "rotary: yarn without rounded bounds",
        SCALING,
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
        "shards: keys are scaled by the weight of the queries",
        SHARDS,
        'f"{parent}.k_norm.weight"',
        'f"{parent}.q_norm.weight"',
        PLAIN + "[default]",
    ),
    Mutation(
        "shards: merged projections overwrite one another",
        SHARDS,
        "start += shard.size",
        "start += 0",
        PLAIN + "[mistral]",
    ),
    Mutation(
        "linear: copies of a KV head go round instead of to neighbours",
        LINEAR,
        "comm.rank * heads // comm.size\n",
        "comm.rank % heads\n",
        "tests/test_tensor_parallel.py::test_pitfall_09_kv_heads_fewer_than_ranks[2-4]",
    ),
    Mutation(
        "embedding: foreign ids count too",
        "minisgl.layers.linear",
        "vectors.mul_(mine.unsqueeze(-1))",
        "vectors",
        "tests/test_tensor_parallel.py::test_pitfall_09_lm_head_is_gathered_whole[7]",
    ),
    Mutation(
        "head: logits of the padding are handed out",
        "minisgl.layers.linear",
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
        "minisgl.layers.linear",
        "self.silu(gate).mul_(up)",
        "self.silu(gate).mul_(gate)",
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
        ATTENTION,
        "bias=config.qkv_bias",
        "bias=False",
        PLAIN + "[yarn]",
    ),
    Mutation(
        "shards: a layer without a rule stays zero",
        SHARDS,
        "if next(layer.parameters(recurse=False), None) is not None:",
        "if False:",
        T + "test_parameter_without_a_rule_is_refused",
    ),
    Mutation(
        "rotary: a stretched model is turned as a plain one",
        ROTARY,
        "if config.scaling is not None:",
        "if False:",
        T + "test_stretched_positions_need_their_rule",
    ),
    Mutation(
        "registry: the stretching is not passed on",
        "minisgl.models.registry",
        "build(config, ctx, scaled_frequencies)",
        "build(config, ctx)",
        PLAIN + "[llama3]",
    ),
    Mutation(
        "weights: a missing tensor stays zero",
        WEIGHTS,
        '"missing ": sorted(specs.keys() - present)',
        '"missing ": []',
        T + "test_missing_tensor_is_named",
    ),
    Mutation(
        "weights: an extra tensor is ignored",
        WEIGHTS,
        "if reason is None],",
        "if False],",
        T + "test_extra_tensor_is_named",
    ),
    Mutation(
        "weights: shapes are not compared",
        WEIGHTS,
        "if shape != spec.shape:",
        "if False:",
        T + "test_misshapen_tensor_is_named_with_both_shapes",
    ),
    Mutation(
        "weights: quantised numbers are taken for weights",
        WEIGHTS,
        "return None if dtype in spec.dtypes else",
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
        "part = whole[spec.source]",
        "part = whole[()]",
        "tests/test_tensor_parallel.py::test_processes_equal_transformers[2]",
    ),
]

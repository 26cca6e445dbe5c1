"""The words of the page of compatibility; each claim about behaviour names the test of it."""

from typing import NamedTuple


class Stated(NamedTuple):
    """A row that no number stands for.

    Attributes:
        what: it is about.
        answer: in a few words.
        test: ``path::name`` of the test that fails when it is no longer so.
    """

    what: str
    answer: str
    test: str


SAMPLED_STEP = Stated(
    "a step that `KappaMonitor` samples, on a CPU",
    "loss, gradients and random numbers of any other step, bit for bit, with dropout too",
    "tests/adapters/test_sampled_steps.py"
    "::test_a_monitor_that_samples_every_step_changes_no_bit_of_training",
)


INTRODUCTION = """\
*Equal* means: on a tiny model of the class with random weights, the results and the gradients are
as near to the same model in float64 as the library's own attention is in the same dtype, twice over
([tests/error_budget.py](../tests/error_budget.py)). The percentage is the largest error as a part
of what is allowed, and the case it is from. What is *refused* raises a `ValueError` whose whole
text stands here. What is *left* stays on the library's own attention, and a call that *falls
back* is computed by it: a report names both, with the reason. Every row is from a test that passed.
"""

LIBRARIES = {
    "transformers": """\
## Hugging Face transformers

```python
from leaner_kernels.adapters import transformers as leaner

print(leaner.use(model))  # what was swapped, what was left and why
leaner.undo(model)

leaner.register()  # or by name, without a report
model = AutoModel.from_pretrained(name, attn_implementation="leaner")
```

`use` reads from the code of each module whether it calls what transformers' `AttentionInterface`
returns, and refuses a model in which none does. By name, transformers itself does not warn where a
model does not dispatch (DeBERTa-v2, Swinv2), and raises a `KeyError` where one looks the name up in
a table of classes (Falcon, Git, GPT-J, GPT-Neo, SAM): build those without it, and call `use`.
""",
    "timm": """\
## timm

```python
from leaner_kernels.adapters import timm as leaner

print(leaner.use(model))  # what was swapped, what was left and why
leaner.undo(model)
```
""",
    "torch": """\
## Plain PyTorch

```python
from leaner_kernels.adapters import pytorch as leaner

print(leaner.use(model))  # nn.MultiheadAttention, nn.TransformerEncoderLayer
leaner.undo(model)
```
""",
    "sdpa": """\
## `attention` in place of `scaled_dot_product_attention`

```python
from leaner_kernels import attention  # argument for argument PyTorch's
```
""",
}

# A part of a message that does not have the advice itself -> what to do.
INSTEAD = {
    "head dimension up to 128": "call PyTorch's function",
    "contiguous along its last axis": "call `.contiguous()` on it",
    "key and value must have one shape": "repeat heads, or pad with zeros and give `scale`",
    "head dimension of at least 1": "leave the call out",
    "must agree in B and D": "`expand` the smaller one",
    "with a key of 4 axes": "`expand` to the same axes",
    "with enable_gqa=True, divide": "`enable_gqa=True`",
    "dropout_p must be in [0, 1)": "zeros: nothing is kept",
    "got tensor": "`scale.item()`",
    "scale must be a finite number": "a finite scale",
    "must not be nested": "`attention_varlen`",
    "the difference of two softmaxes": "timm's own",
    "share their projections": "timm's own",
    "is a subclass of timm": "call `attention` in its forward",
    "head_dim must be in [1, 128]": "narrower heads",
    "computes its attention itself": "its own attention",
    "no dropout of these probabilities": "`attn_drop_rate=0`",
    "at most 64 channels": "narrower heads",
}

SPEED = """\
Medians from Python of a model's trunk without the head over its vocabulary, of timm's models whole,
in evaluation mode: float32 on a CPU, bfloat16 on a GPU. *its own* is the attention that the library
calls, *× own* how many times faster ours is: below 1 is a loss. *with κ* is a step that
`KappaMonitor` samples, and *κ adds* its cost over a step that it does not; with `every=50` one step
in fifty pays it. Output and gradients of every row were held to the error budget before it was
timed. On a CPU `attention` calls PyTorch's: those rows say nothing about the kernels, and show what
an adapter costs.
"""
NO_GPU = (
    "**No GPU run of these is committed yet**: every row below is from a CPU, where `attention` "
    "calls PyTorch. It shows that an adapter passes on the right masks, scales and weights, and "
    "nothing about the kernels: these are held to the same budget by the tests in "
    "[tests/interpreter](../tests/interpreter), in Triton's interpreter."
)

STATED = {
    "transformers": (
        Stated(
            "masks, grouped heads, caches, position bias",
            "mean what they mean to transformers, gradients included",
            "tests/adapters/test_transformers.py::test_a_call_means_what_it_means_to_transformers",
        ),
        Stated(
            "sinks (`s_aux`)",
            "in the softmax, with gradients; a product in 8 more dimensions, from head dimension "
            "121 on an additive mask of (B, H, N, M + 1)",
            "tests/adapters/test_transformers.py::test_a_sink_takes_its_share_and_its_gradient",
        ),
        Stated(
            "`sliding_window` without a mask",
            "kept",
            "tests/adapters/test_transformers.py::test_a_window_is_kept_without_a_mask",
        ),
        Stated(
            "varlen sequences (`cu_seq_lens_q`)",
            "attend within themselves",
            "tests/adapters/test_transformers.py::test_packed_sequences_attend_within_themselves",
        ),
        Stated(
            "models that transformers has not moved to its interface, as Bloom",
            "are refused by `use`; by name, when they request a mask, with their name",
            "tests/adapters/test_transformers.py"
            "::test_a_model_that_would_add_our_masks_to_its_scores_is_refused",
        ),
        Stated(
            "models of which a part does not use the interface, as SAM's and Git's",
            "are swapped where they use it, unless a mask would mean something else to the rest",
            "tests/adapters/test_transformers_use.py"
            "::test_attention_that_does_not_dispatch_is_left_with_the_reason",
        ),
        Stated(
            "a head dimension above 128, values of another one",
            "transformers' call of PyTorch's attention; a warning and the report say so",
            "tests/adapters/test_transformers_use.py"
            "::test_what_the_kernels_do_not_take_falls_back_and_is_reported",
        ),
        Stated(
            "attention weights, and any keyword that the model's own eager attention alone takes",
            "the eager attention computes it, weights included; a warning and the report say so "
            "(GPT-2, OPT and StableLM do not pass `output_attentions` on: no weights, as by sdpa)",
            "tests/adapters/test_transformers_use.py"
            "::test_attention_weights_are_those_of_the_eager_function",
        ),
        Stated(
            "`undo`",
            "the same bits, of copies and pickles too; what was set before `use` or after it stays",
            "tests/adapters/test_transformers_use.py"
            "::test_a_swapped_model_computes_what_it_did_and_undo_brings_back_every_bit",
        ),
        Stated(
            "`torch.compile(fullgraph=True)`",
            "one graph",
            "tests/adapters/test_transformers.py::test_a_model_compiles_into_one_graph",
        ),
        Stated(
            "`KappaMonitor(model)`",
            "statistics of the same pass, by the names of modules",
            "tests/adapters/test_transformers.py"
            "::test_kappa_monitor_reads_the_statistics_of_the_same_pass",
        ),
        SAMPLED_STEP,
    ),
    "timm": (
        Stated(
            "`VisionTransformer(attn_layer=leaner.Attention)`",
            "a model that never had timm's attention",
            "tests/adapters/test_timm.py::test_the_class_is_timms_attn_layer",
        ),
        Stated(
            "`undo`",
            "timm's classes and attributes, bit for bit; weights as trained",
            "tests/adapters/test_timm.py::test_undo_gives_timms_model_back_bit_for_bit",
        ),
        Stated(
            "copies and pickles of a swapped model",
            "are swapped, and can be undone",
            "tests/adapters/test_timm.py::test_a_copy_of_a_swapped_model_is_swapped_and_can_be_undone",
        ),
        Stated(
            "`KappaMonitor(model)`",
            "a row for each swapped layer",
            "tests/adapters/test_timm.py::test_kappa_monitor_reports_each_swapped_layer",
        ),
        SAMPLED_STEP,
        Stated(
            "`torch.compile`",
            "before or after `use`",
            "tests/adapters/test_timm.py::test_a_compiled_model_is_swapped",
        ),
        Stated(
            "`torch.fx.symbolic_trace`",
            "every family, training or not; an operator is one node, projections are modules",
            "tests/adapters/test_tracing.py::test_a_swapped_model_is_traced_by_torch_fx",
        ),
        Stated(
            "`create_feature_extractor` of timm and torchvision",
            "nodes have the names that they have in timm's model",
            "tests/adapters/test_tracing.py"
            "::test_features_of_a_swapped_model_are_extracted_by_their_names",
        ),
        Stated(
            "TorchScript, scripted or traced",
            "is refused in one line; works after `undo`",
            "tests/adapters/test_tracing.py"
            "::test_torchscript_is_refused_in_one_line_until_the_swap_is_undone",
        ),
        Stated(
            "`fully_shard` block by block",
            "after `use`",
            "tests/adapters/test_timm.py::test_a_swapped_model_can_be_sharded_by_block",
        ),
        Stated(
            "dropout while training",
            "timm's numbers for one seed, on a CPU",
            "tests/adapters/test_timm.py::test_dropout_while_training_equals_timms_for_one_seed",
        ),
    ),
    "torch": (
        Stated(
            "inference",
            "no path around our attention",
            "tests/adapters/test_pytorch.py::test_inference_takes_no_path_around_our_attention",
        ),
        Stated(
            "`torch.compile(fullgraph=True)`",
            "one graph",
            "tests/adapters/test_pytorch.py::test_the_layer_compiles_without_a_graph_break",
        ),
        Stated(
            "`nn.MultiheadAttention = leaner.MultiheadAttention`",
            "works: ours keeps PyTorch's own",
            "tests/adapters/test_tracing.py::test_pytorchs_class_may_be_replaced_by_ours",
        ),
        Stated(
            "`torch.fx.symbolic_trace`",
            "the attention is a leaf, as PyTorch's is",
            "tests/adapters/test_tracing.py"
            "::test_pytorchs_swapped_attention_is_a_leaf_to_torch_fx_as_before",
        ),
        Stated(
            "TorchScript, scripted or traced",
            "is refused in one line",
            "tests/adapters/test_tracing.py"
            "::test_torchscript_is_refused_of_pytorchs_swapped_modules",
        ),
        SAMPLED_STEP,
        Stated(
            "`KappaMonitor` on a model without `use`",
            "sees its calls of PyTorch's function; statistics are then recomputed in float32",
            "tests/kappa/test_monitor_foreign.py"
            "::test_calls_of_attention_get_rows_by_the_name_of_their_module",
        ),
        Stated(
            "the same, under `torch.compile`",
            "sampled steps run eagerly, the others compiled",
            "tests/kappa/test_monitor_foreign.py"
            "::test_compiled_models_run_eagerly_in_sampled_steps_alone",
        ),
    ),
    "sdpa": (
        Stated(
            "shapes, masks, scales and strides of PyTorch's own tests",
            "equal, gradients included, in float64, float32, float16 and bfloat16",
            "tests/ops/test_sdpa_cases.py::test_attention_agrees_with_pytorchs",
        ),
        Stated(
            "dropout",
            "the same share is kept, with the same mean",
            "tests/ops/test_sdpa_cases.py::test_dropout_keeps_its_share_and_the_mean",
        ),
        Stated(
            "`F.scaled_dot_product_attention = attention`",
            "works: ours keeps PyTorch's own",
            "tests/ops/test_attention.py::test_sdpa_may_be_replaced_by_attention",
        ),
        Stated(
            "a float32 mask beside other queries",
            "added as it is, with a gradient in float32; other dtypes are refused, as there",
            "tests/ops/test_attention_masks.py::test_a_float32_mask_is_added_in_float32",
        ),
        Stated(
            "jagged nested tensors",
            "go to `attention_varlen` and come back jagged, gradients included; not with a mask",
            "tests/ops/test_jagged.py::test_each_sequence_attends_as_by_pytorchs_function",
        ),
        Stated(
            "`key_lengths`, which PyTorch's has not",
            "hides padding on the right; nothing past a length has a gradient",
            "tests/ops/test_attention_masks.py::test_nothing_past_a_length_has_a_gradient",
        ),
        Stated(
            "`softcap`, which PyTorch's has not",
            "as flash-attention's; equal to the formula, gradients included",
            "tests/ops/test_softcap.py::test_scores_are_bounded_before_anything_hides_them",
        ),
    ),
}

TRANSFORMS = (
    Stated(
        "`torch.compile(fullgraph=True, dynamic=True)`",
        "one graph for all sizes, statistics included",
        "tests/ops/test_compile.py::test_one_compiled_graph_serves_all_sizes",
    ),
    Stated(
        "`torch.export`",
        "an exported layer runs at another size",
        "tests/ops/test_compile.py::test_an_exported_layer_runs_at_another_size",
    ),
    Stated(
        "`vmap`",
        "what a loop gives",
        "tests/ops/test_transforms.py::test_vmap_gives_what_a_loop_gives",
    ),
    Stated(
        "`vmap(grad(...))`",
        "the gradient of each example",
        "tests/ops/test_transforms.py::test_vmap_gives_the_gradient_of_each_example",
    ),
    Stated(
        "second derivatives, forward mode, forward over reverse",
        "of every operator, by PyTorch's, with all scores in memory",
        "tests/ops/test_transforms.py::test_gradgradcheck",
    ),
    Stated(
        "`torch.autocast`",
        "narrows as it does for PyTorch's function",
        "tests/ops/test_transforms.py::test_a_region_of_autocast_narrows_the_operator",
    ),
    Stated(
        "selective activation checkpointing",
        "attention runs once, gradients are equal",
        "tests/ops/test_activation_checkpointing.py::test_the_operator_runs_once_and_gradients_are_equal",
    ),
    Stated(
        "DTensor, tensor parallel over heads",
        "every operator splits by heads and by batch",
        "tests/ops/test_sharding.py"
        "::test_every_operator_splits_by_heads_and_by_batch_without_a_word",
    ),
    Stated(
        "DDP and FSDP2, in float32 and bfloat16",
        "the gradients of one process",
        "tests/ops/test_sharding.py"
        "::test_a_model_written_elsewhere_has_the_gradients_of_one_process",
    ),
    Stated(
        "`FlopCounterMode`",
        "has a formula for every operator of attention",
        "tests/ops/test_flops.py::test_every_attention_operator_has_a_formula",
    ),
)

"""Text models of the transformers library, built from small configurations with random weights."""

from __future__ import annotations

import sys

import transformers as hf
from cases import main
from torch_export import Subject, captured, traced
from transformer_wrappers import SMALL, VOCABULARY, encoder, with_past

#: Installed by pip for this family.
REQUIREMENTS = [
    "torch==2.13.0",
    "transformers==4.49.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
]


@traced("bert", opset=14)
@captured("bert-dynamo")
def _bert() -> Subject:
    model = hf.BertModel(hf.BertConfig(**SMALL))
    return encoder(model, ["last_hidden_state", "pooler_output"], "token_type_ids")


@traced("bert-eager-attention", opset=12)
@captured("bert-eager-attention-dynamo", opset=20)
def _bert_eager_attention() -> Subject:
    model = hf.BertForQuestionAnswering._from_config(hf.BertConfig(**SMALL), attn_implementation="eager")
    return encoder(model, ["start_logits", "end_logits"], "token_type_ids")


@traced("roberta", opset=15)
def _roberta() -> Subject:
    return encoder(hf.RobertaForTokenClassification(hf.RobertaConfig(**SMALL)), ["logits"])


@traced("distilbert", opset=14)
@captured("distilbert-dynamo", opset=21)
def _distilbert() -> Subject:
    config = hf.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    return encoder(hf.DistilBertForMaskedLM(config), ["logits"])


@traced("albert", opset=16)
@captured("albert-dynamo")
def _albert() -> Subject:
    config = hf.AlbertConfig(**SMALL | {"num_hidden_layers": 4}, embedding_size=16)
    return encoder(hf.AlbertModel(config), ["last_hidden_state", "pooler_output"], "token_type_ids")


@traced("deberta-v2", opset=17)
def _deberta_v2() -> Subject:
    config = hf.DebertaV2Config(
        **SMALL, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm"
    )
    return encoder(hf.DebertaV2Model(config), ["last_hidden_state"])


@traced("mpnet", opset=17)
def _mpnet() -> Subject:
    return encoder(hf.MPNetModel(hf.MPNetConfig(**SMALL)), ["last_hidden_state", "pooler_output"])


@traced("electra", opset=13)
def _electra() -> Subject:
    return encoder(
        hf.ElectraForPreTraining(hf.ElectraConfig(**SMALL, embedding_size=16, initializer_range=0.2)), ["logits"]
    )


@traced("xlnet", opset=17)
def _xlnet() -> Subject:
    config = hf.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64)
    return encoder(hf.XLNetModel(config), ["last_hidden_state"])


@traced("funnel", opset=17)
def _funnel() -> Subject:
    config = hf.FunnelConfig(
        vocab_size=VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=64
    )
    return encoder(hf.FunnelModel(config), ["last_hidden_state"])


@traced("modernbert", opset=17)
@captured("modernbert-dynamo")
def _modernbert() -> Subject:
    config = hf.ModernBertConfig(
        **SMALL, pad_token_id=0, reference_compile=False, local_attention=4, attn_implementation="sdpa"
    )
    return encoder(hf.ModernBertModel(config), ["last_hidden_state"])


@traced("gpt2", opset=14)
@captured("gpt2-dynamo", opset=23)
def _gpt2() -> Subject:
    return encoder(hf.GPT2LMHeadModel(_gpt2_config()), ["logits"])


@traced("gpt2-past", opset=14)
@captured("gpt2-past-dynamo")
def _gpt2_past() -> Subject:
    return with_past(hf.GPT2LMHeadModel(_gpt2_config()), 4, 8)


@traced("llama-past", opset=17)
@captured("llama-past-dynamo")
def _llama_past() -> Subject:
    return with_past(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)), 2, 8)


@traced("gpt-neox-past", opset=17)
def _gpt_neox_past() -> Subject:
    return with_past(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL)), 4, 8)


@traced("qwen2-past", opset=17)
@captured("qwen2-past-dynamo", opset=23)
def _qwen2_past() -> Subject:
    return with_past(hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, num_key_value_heads=1)), 1, 8)


@traced("phi-past", opset=18)
def _phi_past() -> Subject:
    return with_past(hf.PhiForCausalLM(hf.PhiConfig(**SMALL, pad_token_id=0)), 4, 8)


@captured("gemma-past-dynamo", opset=20)
def _gemma_past() -> Subject:
    config = hf.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8)
    return with_past(hf.GemmaForCausalLM(config), 1, 8)


@captured("mixtral-dynamo")
@traced("mixtral", opset=17)
def _mixtral() -> Subject:
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2)
    return encoder(hf.MixtralForCausalLM(config), ["logits"])


def _gpt2_config() -> hf.GPT2Config:
    return hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)


if __name__ == "__main__":
    sys.exit(main("transformer_models"))

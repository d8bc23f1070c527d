"""LoRA between homes with TRL and PEFT: the base model is frozen and stays at home, only adapters are sent.

    torchrun --standalone --nproc-per-node 2 examples/lora_homes.py --compression int4      # two workers on one machine
    commlayer join --keys DIR HOST:PORT examples/lora_homes.py                  # in each home

The base, a small Llama, first learns English, alike in each home. Then adapters learn code. commlayer's line is marked.
"""
import argparse
import ast
import inspect
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from peft import LoraConfig
from picture import draw
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from commlayer.integrations.transformers import CommlayerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--base-steps", type=int, default=200)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--plot")
parser.add_argument("--compression", help="a codec such as int4; default: commlayer chooses, and uses none within one machine")
options = parser.parse_args()
torch.manual_seed(0)
letters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token=chr(127)))
letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=chr(0), eos_token=chr(1))
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                                     num_attention_heads=4, max_position_embeddings=128))

english = torch.tensor(list("".join(topics.values()).encode("ascii", "replace"))).unfold(0, 64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(options.base_steps):
    rows = english[torch.randint(len(english), (16,))]
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
code = inspect.getsource(ast) + inspect.getsource(argparse) + inspect.getsource(inspect)
code = Dataset.from_dict({"text": [code[at : at + 64] for at in range(0, len(code) - 64, 64)]}).train_test_split(64, seed=0)
trainer = SFTTrainer(
    model, train_dataset=code["train"], eval_dataset=code["test"], processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig("out", max_steps=options.steps, per_device_train_batch_size=16, learning_rate=1e-2, report_to=[],
                   eval_strategy="steps", eval_steps=10, eval_on_start=True, save_strategy="no", disable_tqdm=True,
                   use_cpu=not torch.cuda.is_available()))
trainer.add_callback(callback := CommlayerCallback(trainer, sync="auto", compression=options.compression))  # commlayer
trainer.train()

trained, frozen = (sum(p.numel() for p in trainer.model.parameters() if p.requires_grad is kind) for kind in (True, False))
sent = callback.session.metrics()["sent_nbytes"] / options.steps / trained
curve = [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]
if trainer.is_world_process_zero():
    print(f"loss on code {curve[0][1]:.3f}, after training {curve[-1][1]:.3f}; {frozen} weights frozen, {trained} in adapters; "
          f"{sent:.2f} bytes sent for each adapter weight and step")
    if options.plot:
        draw(options.plot, {"adapters, averaged over all homes": curve}, "steps", "loss on held-out code")

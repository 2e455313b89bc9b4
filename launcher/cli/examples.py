"""Two examples for the help of each command. Each line is parsed in tests/cli/test_help.py."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, tuple[str, str]]] = {
    "": ("launch init", "launch vertex job.yaml --dry-run"),
    "vertex": (
        "launch vertex job.yaml --dry-run",
        "launch vertex job.yaml --type h100 --gpus 2 --spot --hours 6 --usd 100",
    ),
    "vm": (
        "launch vm --type l4 --gpus 1 --lease 4h --name dev",
        "launch vm job.yaml --run --spot --region us-central1",
    ),
    "vm list": ("launch vm list", "launch vm list --orphans -o json"),
    "vm status": ("launch vm status dev", "launch vm status dev --zone us-central1-a -o json"),
    "vm stop": ("launch vm stop dev", "launch vm stop dev --zone us-central1-a"),
    "vm start": ("launch vm start dev", "launch vm start dev --zone us-central1-a"),
    "vm extend": ("launch vm extend dev --lease 4h", "launch vm extend dev --until 22:40"),
    "vm delete": ("launch vm delete dev", "launch vm delete dev --yes"),
    "vm code": ("launch vm code dev", "launch vm code dev --iap --yes"),
    "ssh": ("launch ssh dev --port-forward 8888", "launch ssh dev -- nvidia-smi"),
    "push-code": ("launch push-code dev .", "launch push-code dev src:work/src --delete --dry-run"),
    "local": ("launch local job.yaml --gpus 2", "launch local job.yaml --nodes 2 --preempt-after 30s"),
    "on": ("launch on gpu-box job.yaml --gpus 2 --dry-run", "launch on me@203.0.113.7:2222 job.yaml --hours 6"),
    "slurm": (
        "launch slurm job.yaml --on login.example.edu --partition gpu --dry-run -o sh",
        "launch slurm job.yaml --on login.example.edu --test-only",
    ),
    "runs": ("launch runs --since 7d", "launch runs --cloud --mine --state running -o json"),
    "sweep": (
        "launch sweep job.yaml --set run.config.optimizer.lr=1e-4,3e-4 --dry-run",
        "launch sweep --random 20 --set 'run.config.optimizer.lr=log(1e-5,1e-2)'",
    ),
    "status": ("launch status", "launch status train-1a2b3c4d -o json"),
    "watch": ("launch watch train-1a2b3c4d", "launch watch runs/train-1a2b3c4d train-5e6f7a8b --watch-for 2h"),
    "follow": ("launch follow train-1a2b3c4d", "launch follow train-1a2b3c4d --watch-for 30m"),
    "logs": ("launch logs train-1a2b3c4d --tail 100", "launch logs train-1a2b3c4d --follow"),
    "metrics": ("launch metrics train-1a2b3c4d --plot", "launch metrics runs/train-1a2b3c4d --all -o json"),
    "report": (
        "launch report train-1a2b3c4d --open",
        "launch report runs/train-1a2b3c4d runs/train-5e6f7a8b -o compared.html",
    ),
    "compare": (
        "launch compare train-1a2b3c4d train-5e6f7a8b",
        "launch compare runs/train-1a2b3c4d runs/train-5e6f7a8b -o json",
    ),
    "cancel": ("launch cancel train-1a2b3c4d", "launch cancel train-1a2b3c4d --region us-central1"),
    "rm": ("launch rm train-1a2b3c4d", "launch rm runs/train-1a2b3c4d runs/train-5e6f7a8b --yes"),
    "move": ("launch move gpu-box:train-1a2b3c4d", "launch move runs/train-1a2b3c4d gs://my-bucket/runs"),
    "export": (
        "launch export train-1a2b3c4d --format hf -o my-model",
        "launch export runs/train-1a2b3c4d --format safetensors --step 300",
    ),
    "bench": ("launch bench --gpus 2 --quick", "launch bench --only matmul,allreduce -o json"),
    "build": ("launch build job.yaml", "launch build job.yaml --builder docker"),
    "push": ("launch push job.yaml", "launch push job.yaml --create-repository"),
    "gpus": ("launch gpus --memory 40GB --provisioning spot", "launch gpus --type h100 --region any -o json"),
    "prices": ("launch prices", "launch prices --update"),
    "init": ("launch init", "launch init experiments/small.yaml"),
    "check": ("launch check job_specs/", "launch check job.yaml --target vm --project my-project"),
    "config": ("launch config", "launch config job.yaml -o json"),
    "estimate": ("launch estimate hf:llama --type h100 --gpus 8", "launch estimate --vram 24GB"),
    "schema": ("launch schema", "launch schema > schema.json"),
    "doctor": ("launch doctor", "launch doctor job.yaml --only project -o json"),
    "setup": ("launch setup --region us-central1", "launch setup --for both --request-quota h100:8 --yes"),
    "selftest": ("launch selftest --only cpu", "launch selftest --project my-project --usd 2"),
}

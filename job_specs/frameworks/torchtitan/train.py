"""torchtitan's own trainer under torchrun. Its checkpoints go to the run folder, and a resume takes the newest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from torchtitan.train import main

TOKENIZER = "meta-llama/Llama-3.1-8B"

if __name__ == "__main__":
    # On Vertex AI each bucket is a folder below /gcs.
    run = os.environ.get("LAUNCH_RUN_FOLDER", "out").replace("gs://", "/gcs/", 1)
    assets = snapshot_download(TOKENIZER, allow_patterns=["tokenizer*", "*config.json"])
    sys.argv += [f"--hf_assets_path={assets}", f"--dump_folder={Path(run) / 'torchtitan'}"]
    sys.argv += ["--checkpoint.enable", "--checkpoint.interval=100", "--metrics.disable_color_printing"]
    main()

"""A real, tiny PPO training of Stable-Baselines3: ``python train.py LOG_PATH REPORT_TO``."""

from __future__ import annotations

import sys

import gymnasium
from runmirror_sb3 import RunMirrorWriter
from stable_baselines3 import PPO
from stable_baselines3.common.logger import JSONOutputFormat, Logger

if __name__ == "__main__":
    log_path, report_to = sys.argv[1:]
    options = {"n_steps": 64, "batch_size": 32, "n_epochs": 2}
    model = PPO("MlpPolicy", gymnasium.make("CartPole-v1"), device="cpu", seed=0, **options)
    ours = RunMirrorWriter(log_path, options, report_to=report_to)
    model.set_logger(Logger(None, [ours, JSONOutputFormat(f"{ours.run.log_path}/progress.json")]))
    model.learn(320)
    model.logger.close()

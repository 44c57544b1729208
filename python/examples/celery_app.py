"""Two jobs at a time on all Celery workers together, each on a GPU of its own.

BROKER=redis://localhost:6379 celery --app celery_app worker --pool prefork --concurrency 8
"""

import os
import time

from celery import Celery

import leasehold

broker = os.environ["BROKER"]
app = Celery("celery_app", broker=broker, backend=broker)
client = leasehold.Client(broker)  # each worker process connects at its first use
gpus = client.semaphore("gpus", 2, numbered=True)


@app.task
def train(job: int) -> tuple[int, float, float]:
    with gpus.guard() as permit:
        assert permit.slot_number is not None
        os.environ["CUDA_VISIBLE_DEVICES"] = str(permit.slot_number - 1)
        begun = time.time()
        time.sleep(0.2)  # train
        return permit.slot_number, begun, time.time()

"""The module as DDP or DeepSpeed runs it, with its fp32 masters.

The weights that matter are the fp32 masters, in whoever's hands they are: the parameters themselves under DDP, flat
shards over the ranks under DeepSpeed. `read_state` and `load_state` see whole tensors under the module's names in
both cases, so a checkpoint of one can be resumed by the other.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eagle3.config import ObjectiveConfig, OptimizerConfig, TrainConfig
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences
from eagle3.training.distributed import Setup, World, check_setup
from eagle3.training.host_copy import HostCopy
from eagle3.training.memory import MemoryPlan
from eagle3.training.timing import Mark

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, by torch's names
MASTER = "master"
EMA = "ema"  # beside the moments, where ZeRO shards it and finds it as it does those


class TTTModule(nn.Module):
    """The drafter with one forward that does a whole pack, so that the wrappers' hooks fire once per backward."""

    def __init__(self, drafter: Eagle3Drafter, target: TargetWeights, objective: ObjectiveConfig, bf16: bool) -> None:
        super().__init__()
        self.drafter = drafter
        self.target = target  # no parameters of this module: frozen, and of no concern to optimizer and checkpoints
        self.objective = objective
        self.bf16 = bf16
        self.host_embeddings: Tensor | None = None  # (V, D) where the target has none: batches bring their rows
        self.memory_plan: MemoryPlan | None = None  # set on a GPU: what of a micro-batch is made again

    def autocast(self) -> torch.autocast:
        """Returns the context that every forward runs in; parameters keep their own dtype."""
        return torch.autocast(self.drafter.d2t.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def forward(self, packed: PackedSequences, step_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the loss () and the sums (4, K) of `MetricSums` of a pack.

        step_weights (K,) replace the decay ** k of the objective. Tensors in a tuple, and no dataclass: DeepSpeed looks
        for tensors in what a forward returns, to do before their backward what a backward needs. Where it finds none,
        its bf16 optimizer adds the gradients of earlier micro-steps once more.
        """
        num_recomputed = 0
        if self.memory_plan is not None:
            num_recomputed = self.memory_plan.num_recomputed(packed.loss_mask.numel(), int(packed.loss_mask.sum()))
        with self.autocast():
            sums = ttt_sums(
                self.drafter,
                self.target,
                packed,
                ttt_steps=self.objective.ttt_steps,
                ttt_decay=self.objective.ttt_decay,
                kind=self.objective.loss,
                renormalise=self.objective.renormalise,
                # Held-out rows stay, so that their figures can be compared whatever the objective.
                drop_rejected=self.objective.drop_rejected and torch.is_grad_enabled(),
                step_weights=step_weights,
                num_recomputed=num_recomputed,
            )
        return sums.loss, torch.stack([sums.step_loss, sums.num_counted, sums.num_top1, sums.acceptance])


def state_kinds(*, has_average: bool) -> tuple[str, ...]:
    """Returns what a checkpoint keeps of each parameter, in fp32."""
    return (MASTER, *MOMENTS, EMA) if has_average else (MASTER, *MOMENTS)


class Engine:
    """Forward, backward and update of a module over all ranks."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, world: World, module: TTTModule) -> None:
        """Wraps the module.

        Raises:
            UserError: accelerate made something else of it than the config asks for.
        """
        self.module = module
        self.world = world
        self.at: Callable[[str], None] = lambda part: None  # is told what part of a step begins; see watch.py
        self._accelerator = accelerator
        self._max_grad_norm = config.optimizer.max_grad_norm
        initial = {name: parameter.detach().clone() for name, parameter in self._named_parameters()}
        optimizer = make_optimizer(module, config.optimizer, world.device)
        self.model, wrapped = accelerator.prepare(module, optimizer)
        self.setup: Setup = check_setup(config, accelerator, self.model, world)
        self.uses_deepspeed = self.setup.zero_stage is not None
        # Two wrappers deep under DeepSpeed: accelerate's, ZeRO's, and torch's with the flat fp32 shards.
        self._optimizer: torch.optim.Optimizer = wrapped.optimizer.optimizer if self.uses_deepspeed else optimizer
        if self.uses_deepspeed:
            # In bf16 ZeRO makes its masters from parameters that are cast already.
            self._set_masters(initial.__getitem__)
        self._ema_decay = config.optimizer.ema_decay
        self._num_updates = 0
        self._kinds = state_kinds(has_average=self._ema_decay is not None)
        if self._ema_decay is not None:
            self._init_optimizer_state(num_steps=0)
        for group in self._optimizer.param_groups:
            dtypes = {parameter.dtype for parameter in group["params"]}
            assert dtypes == {torch.float32}, f"master weights must be fp32, got {dtypes}"

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Returns the context of one micro-step; gradients cross the ranks in the last one of a step."""
        if self.uses_deepspeed:
            self.model.set_gradient_accumulation_boundary(is_last)
            return contextlib.nullcontext()
        context: AbstractContextManager[Any] = self._accelerator.no_sync(self.model)
        return contextlib.nullcontext() if is_last else context

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradients; both wrappers average them over the ranks."""
        self.own_done: Mark | None = None  # when the last gradient was made, before it has crossed the ranks
        if self.world.size > 1:
            loss.register_hook(self._mark_later)
        if self.uses_deepspeed:
            self.model.backward(loss, scale_wrt_gas=False)
        else:
            loss.backward()

    def update(self, learning_rate: float) -> float:
        """Clips, updates the weights and clears the gradients; returns the gradient norm over all ranks.

        A gradient that is not finite leaves the weights as they were and comes back as such a norm.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self.uses_deepspeed:
            self.model.step()  # checks over the ranks, and skips the update of a non-finite gradient itself
            norm = float(self.model.get_global_grad_norm())
        else:
            norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm))
            if norm < float("inf"):  # false for nan too
                self._optimizer.step()
            self._optimizer.zero_grad()
        self._num_updates += 1
        if self._ema_decay is not None and norm < float("inf"):
            self._average(self._ema_decay)
        return norm

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Puts the average of the weights in their place for the length of the block, if one is kept."""
        self._swap_with_average()
        yield
        self._swap_with_average()  # not after an error: the other ranks may be gone, and it waits for them

    def read_state(self, host: HostCopy | None = None) -> dict[str, Tensor]:
        """Returns masters and moments on the main rank's CPU as `master.NAME`, `exp_avg.NAME`, ...; elsewhere nothing.

        They lie in `host`, which takes `state_bytes`, or in memory of their own. Every rank must call it.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._named_parameters():
            for kind in self._kinds:
                tensor, key = self._read(parameter, kind), f"{kind}.{name}"
                if self.world.is_main:
                    state[key] = tensor.detach().cpu().clone() if host is None else host.copy(key, tensor)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return state

    @property
    def state_bytes(self) -> int:
        """The size of what `read_state` returns on the main rank; fp32."""
        return 4 * len(self._kinds) * sum(parameter.numel() for _, parameter in self._named_parameters())

    def load_state(self, read: Callable[[str], Tensor], num_steps: int) -> None:
        """Sets masters and moments from whole tensors, `read` by the names of `read_state`."""
        self._init_optimizer_state(num_steps)
        self._set_masters(lambda name: read(f"{MASTER}.{name}"))
        for name, parameter in self._named_parameters():
            for kind in self._kinds[1:]:
                self._write(parameter, kind, read(f"{kind}.{name}"))

    def _mark_later(self, grad: Tensor) -> None:
        """Marks the end of autograd's own work; what the wrappers do behind it is queued after this."""

        def mark() -> None:
            self.own_done = Mark(self.world.device)

        torch.autograd.Variable._execution_engine.queue_callback(mark)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.drafter.named_parameters())

    def _masters(self) -> list[Tensor]:
        """Returns this rank's masters as the optimizer has them: parameters, or flat shards under DeepSpeed."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _init_optimizer_state(self, num_steps: int) -> None:
        """Makes the optimizer's state as after so many steps, with moments of zero, and an average of what there is."""
        self._num_updates = num_steps
        average = [] if self._ema_decay is None else [EMA]
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if self._optimizer.state[parameter]:  # ZeRO has linked these, and would not see others in their place
                    self._optimizer.state[parameter]["step"].fill_(float(num_steps))
                    continue
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(num_steps), device=parameter.device if group["fused"] else "cpu"),
                    **{kind: torch.zeros_like(parameter) for kind in MOMENTS},
                    **{kind: parameter.detach().clone() for kind in average},
                }
        if self.uses_deepspeed:
            # ZeRO links them to the parameters after its first step, and there was none here.
            self.model.optimizer._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def _average(self, decay: float) -> None:
        """Moves the average towards the weights; faster at first, or it would keep those that training began with."""
        kept = min(decay, (1 + self._num_updates) / (10 + self._num_updates))
        for master in self._masters():
            self._optimizer.state[master][EMA].lerp_(master, 1 - kept)

    @torch.no_grad()
    def _swap_with_average(self) -> None:
        if self._ema_decay is None:
            return
        for master in self._masters():
            average = self._optimizer.state[master][EMA]
            weights = master.clone()
            master.copy_(average)
            average.copy_(weights)
        if self.uses_deepspeed:
            self.model.optimizer.update_lp_params()

    @torch.no_grad()
    def _set_masters(self, read: Callable[[str], Tensor]) -> None:
        for name, parameter in self._named_parameters():
            self._write(parameter, MASTER, read(name))
        if self.uses_deepspeed:
            self.model.optimizer.update_lp_params()

    def _read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        if not self.uses_deepspeed:
            tensor: Tensor = parameter if kind == MASTER else self._optimizer.state[parameter][kind]
            return tensor
        # deepspeed picks its device when it is imported, which distributed.start prepares.
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        full = safe_get_full_fp32_param(parameter) if kind == MASTER else safe_get_full_optimizer_state(parameter, kind)
        assert isinstance(full, Tensor), f"ZeRO must hold the {kind} of every parameter, got {full!r}"
        return full

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        assert value.shape == parameter.shape, (kind, value.shape, parameter.shape)
        value = value.to(self.world.device)
        if not self.uses_deepspeed:
            self._read(parameter, kind).copy_(value)
            return
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if kind == MASTER:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)


def make_optimizer(module: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Returns AdamW over all parameters; the learning rate is set at every step."""
    return torch.optim.AdamW(
        module.parameters(),
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )

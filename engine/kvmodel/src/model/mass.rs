//! The attention mass of tokens: the total attention that each token gets from a sequence's later rows.
//!
//! The device adds each included layer's attention weights to sums in its own memory. The sums are read
//! once, after the last pass.

use std::sync::Arc;

use kvcore::{
    Attend, AttendMass, AttendRows, AttendWork, Backend, DType, MemoryKind, MergeGroup, Segment, Stream,
    TensorView, allocate_tensor,
};

use super::rows::visible_in;
use super::{ComputeDevice, Model, read_f32};
use crate::error::Result;

// Decision: docs/decisions/chunks.md#the-question-chooses-by-its-own-attention
/// The attention that one sequence in a pass pays to each token of its earlier segments, summed over the
/// sequence's rows, query heads and layers.
///
/// Pass it to [`Pass::observe`](super::Pass::observe). If a sequence is computed in several passes, pass
/// the same mass to all of them. All passes must run on the same backend.
#[derive(Debug, Default)]
pub struct AttentionMass {
    /// The index of the sequence in the batch.
    pub sequence: usize,
    /// The first layer to include in the sums.
    pub first_layer: usize,
    /// The number of floating-point operations that the sums have needed. They are not included in a pass's
    /// own count.
    pub flops: u64,
    /// The number of tokens in all segments but the last, which holds the sequence's own rows.
    tokens: usize,
    /// The sums on the device, if a pass has observed the sequence.
    sums: Option<TensorView>,
}

impl AttentionMass {
    /// Creates the mass of a sequence with `tokens` tokens in all segments but the last, which holds the
    /// sequence's own rows. Layers before `first_layer` are not included.
    pub fn new(first_layer: usize, tokens: usize) -> Self {
        Self { first_layer, tokens, ..Self::default() }
    }

    /// Waits for the passes on `stream`, and returns one sum for each token.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    pub fn read(&self, stream: &dyn Stream) -> Result<Vec<f32>> {
        self.sums.as_ref().map_or_else(|| Ok(vec![0.0; self.tokens]), |sums| read_f32(stream, sums))
    }

    /// Returns the sums on the device, which the first call allocates, or `None` if the sequence has no
    /// tokens before its own rows.
    fn on_device(&mut self, backend: &dyn Backend) -> Result<Option<TensorView>> {
        if self.sums.is_none() && self.tokens > 0 {
            self.sums = Some(allocate_tensor(backend, MemoryKind::Device, DType::F32, &[self.tokens])?);
        }
        Ok(self.sums.clone())
    }
}

/// The sequences that a pass observes, with the buffers for summing their attention.
#[derive(Debug)]
pub(super) struct Observation<'a> {
    masses: Vec<&'a mut AttentionMass>,
    /// The log-sum-exp for each of the pass's rows and query heads, on the device.
    lse: TensorView,
    /// For each group of layers, the attention work of only the observed rows, all in one softmax; `None`
    /// until it is first needed.
    alone: Vec<Option<Arc<AttendWork>>>,
}

impl<'a> Observation<'a> {
    /// Creates an observation of the sequences in `masses`, in a pass with `rows` rows.
    pub(super) fn new(
        model: &Model,
        device: &ComputeDevice,
        masses: Vec<&'a mut AttentionMass>,
        rows: usize,
    ) -> Result<Self> {
        let shape = [rows, model.config().heads];
        let lse = allocate_tensor(device.backend, MemoryKind::Device, DType::F32, &shape)?;
        Ok(Self { masses, lse, alone: vec![None; device.arenas.len()] })
    }

    /// Returns true if at least one of the sums includes `layer`.
    pub(super) fn includes(&self, layer: usize) -> bool {
        self.masses.iter().any(|mass| layer >= mass.first_layer)
    }

    /// Returns true if every observed row attends with a single softmax, because the merge groups of its
    /// segments have no factors. In that case, the layer's ordinary attention yields the attention weights
    /// to sum.
    pub(super) fn is_plain(&self, work: &AttendWork) -> bool {
        let plain = |segment: &Segment| work.groups()[segment.merge_group] == MergeGroup::default();
        self.masses.iter().all(|mass| work.batch()[mass.sequence].segments.iter().all(plain))
    }

    /// Returns the part of `work`, the attention work of the layers in `group`, that belongs to the observed
    /// rows. In the result, all segments share one softmax.
    pub(super) fn alone(&mut self, group: usize, work: &AttendWork) -> Arc<AttendWork> {
        let masses = &self.masses;
        let make = || {
            let entry = |(index, entry): (usize, &AttendRows)| {
                let observed = masses.iter().any(|mass| mass.sequence == index);
                if observed { entry.clone() } else { AttendRows::new(0..0, []) }
            };
            let batch: Vec<_> = work.batch().iter().enumerate().map(entry).collect();
            let groups = vec![MergeGroup::default(); work.groups().len()];
            Arc::new(AttendWork::with_groups(work.rows().to_vec(), batch, groups))
        };
        Arc::clone(self.alone[group].get_or_insert_with(make))
    }

    /// Returns the view that the attention must write its log-sum-exps to.
    pub(super) fn lse(&self) -> &TensorView {
        &self.lse
    }

    /// Adds the attention weights of `attend` in `layer` to the sums. `attend` must have been launched and
    /// must write its log-sum-exps to [`lse`](Self::lse).
    pub(super) fn add(
        &mut self,
        device: &ComputeDevice,
        layer: usize,
        attend: &Attend,
        q_latent: Option<&TensorView>,
    ) -> Result<()> {
        for mass in self.masses.iter_mut().filter(|mass| layer >= mass.first_layer) {
            let Some(sums) = mass.on_device(device.backend)? else { continue };
            let op = AttendMass {
                attend: attend.clone(),
                q_latent: q_latent.cloned(),
                entry: mass.sequence,
                sums,
            };
            device.stream.attend_mass(&op)?;
            let width: usize = [Some(&attend.q), q_latent].into_iter().flatten().map(|q| q.shape()[2]).sum();
            let rows = attend.work.batch()[mass.sequence].rows.len() * attend.q.shape()[1];
            mass.flops += 2 * (rows * width * mass.tokens) as u64;
        }
        Ok(())
    }

    /// Adds the operations of attention over `work`, computed only for its log-sum-exps, to the masses'
    /// counts.
    pub(super) fn count(&mut self, model: &Model, layer: usize, work: &AttendWork) {
        for mass in self.masses.iter_mut().filter(|mass| layer >= mass.first_layer) {
            mass.flops += model.attention_flops(visible_in(work, &work.batch()[mass.sequence]));
        }
    }
}

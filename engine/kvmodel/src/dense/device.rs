//! The dense steps on a device: weights and activations stay in the device's memory, and only token IDs and
//! logits are transferred.
//!
//! Each backend has a type whose methods have the same names as the methods of [`Dense`](super::Dense). The
//! macro in this file implements `Dense` by calling these methods.

/// Implements [`Dense`](super::Dense) on top of a backend's steps. `place` must be a function that uploads a
/// weight to the device.
macro_rules! device_dense {
    (
        $(#[$doc:meta])*
        $dense:ident of $name:literal: $backend:ty, $steps:ty, $weight:ty,
        place: $place:expr
    ) => {
        use std::any::Any;
        use std::ops::Range;
        use std::sync::Arc;

        use kvcore::{Backend, Stream, TensorView};

        use super::{
            Activation, AttentionInput, Border, BorderExtents, Dense, GateActivation, RowIndex, StoredWeight, Weight,
            WeightFormat, WeightUse,
        };
        use crate::error::{Error, Result, WeightProblem};

        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $dense {
            steps: Arc<$steps>,
        }

        const NAME: &str = $name;

        impl $dense {
            /// Creates the steps for a backend's device.
            ///
            /// # Errors
            /// Returns [`kvcore::Error::NoDevice`] if the steps need something that the device's libraries
            /// lack, and the errors of the device.
            pub fn new(backend: &$backend) -> Result<Self> {
                Ok(Self { steps: Arc::new(<$steps>::new(backend)?) })
            }

            fn activation(rows: kvcore::Result<TensorView>) -> Result<Activation> {
                Ok(Activation::on_device(rows?))
            }
        }

        /// A weight on the device.
        #[derive(Debug)]
        struct HeldWeight {
            held: Arc<$weight>,
            bytes: usize,
            transposed: bool,
        }

        impl Weight for HeldWeight {
            fn bytes(&self) -> usize {
                self.bytes
            }
            fn as_any(&self) -> &dyn Any {
                self
            }
        }

        fn foreign(what: &'static str) -> Error {
            kvcore::Error::ForeignHandle { what, backend: NAME }.into()
        }

        fn rows_of(x: &Activation) -> Result<&TensorView> {
            x.view().ok_or_else(|| foreign("an activation"))
        }

        fn held(weight: &dyn Weight) -> Result<&HeldWeight> {
            weight.as_any().downcast_ref().ok_or_else(|| foreign("a weight"))
        }

        impl Dense for $dense {
            fn name(&self) -> &'static str {
                NAME
            }

            fn load(&self, stored: &StoredWeight, purpose: WeightUse) -> Result<Arc<dyn Weight>> {
                let expected = match purpose {
                    WeightUse::Vector => 1,
                    WeightUse::Table | WeightUse::Projection(_) | WeightUse::ExactProjection => 2,
                    WeightUse::ByHead | WeightUse::ByHeadTransposed => 3,
                };
                let got = stored.shape().len();
                if expected != got {
                    let (name, problem) = (stored.name().to_owned(), WeightProblem::Rank { expected, got });
                    return Err(Error::Weight { name, problem });
                }
                let place: fn(&$steps, &StoredWeight, WeightUse) -> Result<$weight> = $place;
                let held = Arc::new(place(&self.steps, stored, purpose)?);
                let transposed = purpose == WeightUse::ByHeadTransposed;
                Ok(Arc::new(HeldWeight { bytes: held.bytes(), held, transposed }))
            }

            /// Shares the table's memory in every format, because the table keeps its stored type.
            fn tied_head(&self, table: &dyn Weight, _: WeightFormat) -> Result<Arc<dyn Weight>> {
                let table = held(table)?;
                Ok(Arc::new(HeldWeight { held: Arc::clone(&table.held), bytes: 0, transposed: false }))
            }

            fn border(&self, _: &dyn Backend, extents: &BorderExtents) -> Result<Box<dyn Border>> {
                Ok(Box::new(DeviceBorder { steps: Arc::clone(&self.steps), extents: *extents, ordered: None }))
            }

            fn index(&self, rows: Vec<u32>) -> Result<RowIndex> {
                Ok(RowIndex::on_device(self.steps.index(&rows)?, rows.len()))
            }

            fn joins_captures(&self) -> bool {
                true
            }

            fn embed(&self, table: &dyn Weight, tokens: &[u32], scale: f32) -> Result<Activation> {
                Self::activation(self.steps.embed(&held(table)?.held, tokens, scale))
            }

            fn rms_norm(&self, x: &Activation, weight: &dyn Weight, eps: f64) -> Result<Activation> {
                Self::activation(self.steps.rms_norm(rows_of(x)?, &held(weight)?.held, eps as f32))
            }

            fn project(&self, x: &Activation, matrix: &dyn Weight, bias: Option<&dyn Weight>) -> Result<Activation> {
                let bias = bias.map(|bias| held(bias).map(|bias| bias.held.as_ref())).transpose()?;
                Self::activation(self.steps.project(rows_of(x)?, &held(matrix)?.held, bias))
            }

            fn by_head(&self, x: &Activation, matrices: &dyn Weight) -> Result<Activation> {
                let matrices = held(matrices)?;
                Self::activation(self.steps.by_head(rows_of(x)?, &matrices.held, matrices.transposed))
            }

            fn gated(
                &self,
                activation: GateActivation,
                gate: &Activation,
                up: &Activation,
            ) -> Result<Activation> {
                let (gate, up) = (rows_of(gate)?, rows_of(up)?);
                Self::activation(match activation {
                    GateActivation::Silu => self.steps.gated(gate, up),
                    GateActivation::GeluTanh => self.steps.gated_gelu(gate, up),
                })
            }

            fn add(&self, x: &Activation, y: &Activation) -> Result<Activation> {
                Self::activation(self.steps.add(rows_of(x)?, rows_of(y)?))
            }

            fn split_heads(&self, x: &Activation, dim: usize) -> Result<Activation> {
                Self::activation(self.steps.split_heads(rows_of(x)?, dim))
            }

            fn join_heads(&self, x: &Activation) -> Result<Activation> {
                Self::activation(self.steps.join_heads(rows_of(x)?))
            }

            fn columns(&self, x: &Activation, columns: Range<usize>) -> Result<Activation> {
                let x = rows_of(x)?;
                Self::activation(x.slice(x.shape().len().saturating_sub(1), columns.start, columns.end))
            }

            fn select(&self, x: &Activation, rows: &RowIndex) -> Result<Activation> {
                let numbers = rows.storage().ok_or_else(|| foreign("a list of rows"))?;
                Self::activation(self.steps.select(rows_of(x)?, numbers, rows.len()))
            }

            fn zeros_like(&self, x: &Activation) -> Result<Activation> {
                Self::activation(self.steps.zeros_like(rows_of(x)?))
            }

            fn add_rows(
                &self,
                sum: &Activation,
                rows: &RowIndex,
                factors: Vec<f32>,
                y: &Activation,
            ) -> Result<Activation> {
                let numbers = rows.storage().ok_or_else(|| foreign("a list of rows"))?;
                Self::activation(self.steps.add_rows(rows_of(sum)?, numbers, &factors, rows_of(y)?))
            }

            fn read(&self, x: &Activation, values: &mut Vec<f32>) -> Result<()> {
                Ok(self.steps.read(rows_of(x)?, values)?)
            }
        }

        /// A border on a device. Each view is the activation itself, and events order the steps' stream and
        /// the operations' stream.
        #[derive(Debug)]
        struct DeviceBorder {
            steps: Arc<$steps>,
            extents: BorderExtents,
            /// The number of steps that had been enqueued when the operations' stream last waited for
            /// them.
            ordered: Option<u64>,
        }

        impl Border for DeviceBorder {
            fn rows(&self) -> usize {
                self.extents.rows
            }

            fn follow(&mut self, stream: &dyn Stream) -> Result<()> {
                Ok(<$steps>::order(stream, self.steps.stream())?)
            }

            fn precede(&mut self, stream: &dyn Stream) -> Result<()> {
                // Queries, keys and values are lent with no step in between, so only the first of these calls
                // orders the streams.
                let steps = self.steps.enqueued();
                if self.ordered != Some(steps) {
                    <$steps>::order(self.steps.stream(), stream)?;
                    self.ordered = Some(steps);
                }
                Ok(())
            }

            fn lend(&mut self, stream: &dyn Stream, _: AttentionInput, rows: &Activation) -> Result<TensorView> {
                self.precede(stream)?;
                Ok(rows_of(rows)?.clone())
            }

            fn lend_copy(
                &mut self,
                stream: &dyn Stream,
                input: AttentionInput,
                rows: &Activation,
            ) -> Result<TensorView> {
                let copy = self.steps.copy(rows_of(rows)?)?;
                self.lend(stream, input, &Activation::on_device(copy))
            }

            fn output(&mut self, stream: &dyn Stream, rows: usize) -> Result<TensorView> {
                let output = self.steps.rows(&[rows, self.extents.heads, self.extents.v_dim])?;
                // An earlier step, possibly another thread's, may still be reading this recycled memory.
                // Operations of `stream` must not write to it before that step has finished.
                self.precede(stream)?;
                Ok(output)
            }

            fn take(&mut self, stream: &dyn Stream, output: TensorView) -> Result<Activation> {
                self.follow(stream)?;
                Ok(Activation::on_device(output))
            }
        }
    };
}
pub(super) use device_dense;

//! Lists that are on the device already: the layers of a step share their indices, angles and masks.

use std::any::Any;
use std::sync::Arc;

use kvcore::Result;
use smallvec::{SmallVec, smallvec};

use crate::operators::Tensor;
use crate::stream::{Held, Upload, Work};

/// Number of lists that a stream keeps. A step has few: indices of K and V, angles, and those of attention.
const KEPT: usize = 16;

/// What a list is made of: addresses of what its owner keeps alive, and numbers.
pub(super) type ListKey = SmallVec<[u64; 12]>;

/// Keeps in its place what a key names by its address.
pub(super) type ListOwner = Box<dyn Any + Send + Sync>;

/// Lists of the last operations of a stream, each with what was made of it.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    kept: Vec<(ListKey, Kept)>,
    next: usize,
}

struct Kept {
    #[expect(dead_code, reason = "held so that the places in the key stay taken")]
    owner: ListOwner,
    made: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kept")
    }
}

impl Plans {
    /// Returns what was made for a key.
    pub(super) fn get<T: Send + Sync + 'static>(&self, key: &ListKey) -> Option<Arc<T>> {
        let kept = self.kept.iter().find(|(known, _)| known == key);
        kept.and_then(|(_, kept)| Arc::clone(&kept.made).downcast().ok())
    }

    /// Keeps what was made for a key in place of the oldest.
    pub(super) fn keep<T: Send + Sync + 'static>(&mut self, key: ListKey, owner: ListOwner, made: &Arc<T>) {
        let entry = (key, Kept { owner, made: Arc::clone(made) as Arc<dyn Any + Send + Sync> });
        if self.kept.len() < KEPT {
            self.kept.push(entry);
        } else {
            self.kept[self.next] = entry;
            self.next = (self.next + 1) % KEPT;
        }
    }
}

/// A tensor on the device that came from a list of the host.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) tensor: Tensor,
    upload: Arc<Upload>,
}

impl Sent {
    /// Sends numbers up as a dense tensor.
    pub(super) fn send<T: bytemuck::NoUninit>(
        work: &mut Work<'_>,
        numbers: &[T],
        dtype: crate::bindings::types::aclDataType,
        dims: &[usize],
    ) -> Result<Self> {
        let upload = work.send(bytemuck::cast_slice(numbers))?;
        Ok(Self { tensor: Tensor::dense(upload.address(), dtype, dims), upload })
    }

    /// Sends up one number.
    pub(super) fn one(work: &mut Work<'_>, number: f32) -> Result<Tensor> {
        let key: ListKey = smallvec![22, number.to_bits().into()];
        if let Some(known) = work.plans().get::<Self>(&key) {
            known.hold(work);
            return Ok(known.tensor.clone());
        }
        let made = Arc::new(Self::send(work, &[number], crate::bindings::types::ACL_FLOAT, &[1, 1, 1])?);
        work.plans().keep(key, Box::new(()), &made);
        Ok(made.tensor.clone())
    }

    /// Returns some rows of the list.
    pub(super) fn rows(&self, first: usize, count: usize) -> Self {
        Self { tensor: self.tensor.sliced(0, first, count), upload: Arc::clone(&self.upload) }
    }

    /// Holds the list until the work is done.
    pub(super) fn hold(&self, work: &mut Work<'_>) {
        work.hold(Held::Upload(Arc::clone(&self.upload)));
    }
}

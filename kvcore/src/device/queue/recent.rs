//! A small map that keeps only the newest values.

/// The `N` values that were added last, each with its key.
///
/// ```
/// use kvcore::device::queue::Recent;
///
/// let mut recent = Recent::<u32, &str, 2>::default();
/// for (key, value) in [(1, "one"), (2, "two"), (3, "three")] {
///     recent.keep(key, value);
/// }
/// assert_eq!((recent.get(&1), recent.get(&3)), (None, Some(&"three")));
/// ```
#[derive(Debug)]
pub struct Recent<K, V, const N: usize> {
    kept: Vec<(K, V)>,
    /// Index of the oldest value once there are `N` values.
    next: usize,
}

impl<K, V, const N: usize> Default for Recent<K, V, N> {
    fn default() -> Self {
        Self { kept: Vec::new(), next: 0 }
    }
}

impl<K: PartialEq, V, const N: usize> Recent<K, V, N> {
    /// Returns the value stored under a key, if there is one.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.kept.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// Stores the value of a new key, replacing the oldest value if there are already `N` values.
    pub fn keep(&mut self, key: K, value: V) {
        if self.kept.len() < N {
            return self.kept.push((key, value));
        }
        self.kept[self.next] = (key, value);
        self.next = (self.next + 1) % N;
    }
}

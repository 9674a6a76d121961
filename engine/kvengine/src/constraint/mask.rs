//! Sets of tokens.

/// A set of tokens of a vocabulary.
///
/// ```
/// use kvengine::TokenMask;
/// let mask: TokenMask = [3, 70].into_iter().collect();
/// assert!(mask.contains(70) && !mask.contains(4) && !mask.contains(1000));
/// assert_eq!(mask.tokens().collect::<Vec<_>>(), [3, 70]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenMask(Vec<u32>);

impl TokenMask {
    /// Creates a set from words of 32 bits. Bit `t % 32` of word `t / 32` is set if the set contains the token `t`.
    pub fn from_words(words: Vec<u32>) -> Self {
        Self(words)
    }

    /// Returns true if the set contains a token.
    pub fn contains(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Adds a token.
    pub fn insert(&mut self, token: u32) {
        let word = token as usize / 32;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (token % 32);
    }

    /// Returns the tokens of the set, in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).step_by(32).zip(&self.0).flat_map(|(first, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(first + bit)
            })
        })
    }
}

impl FromIterator<u32> for TokenMask {
    fn from_iter<T: IntoIterator<Item = u32>>(tokens: T) -> Self {
        let mut mask = Self::default();
        tokens.into_iter().for_each(|token| mask.insert(token));
        mask
    }
}

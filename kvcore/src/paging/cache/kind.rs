//! The kinds of layer groups, which differ in the tokens that their layers attend to, or in what they store.

/// The tokens that a group's layers attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupKind {
    /// All earlier tokens.
    Full,
    /// The last `window` tokens.
    SlidingWindow {
        /// Number of tokens in the window, including the token that attends.
        window: usize,
    },
    /// All earlier tokens, each with one latent row (MLA).
    Latent,
}

impl GroupKind {
    /// Returns the index of the first token that `token` or a later token attends to.
    ///
    /// ```
    /// use kvcore::GroupKind;
    /// assert_eq!(GroupKind::Full.first_needed(100), 0);
    /// assert_eq!(GroupKind::SlidingWindow { window: 8 }.first_needed(100), 93);
    /// ```
    pub fn first_needed(self, token: usize) -> usize {
        match self {
            Self::Full | Self::Latent => 0,
            Self::SlidingWindow { window } => token.saturating_add(1).saturating_sub(window),
        }
    }
}

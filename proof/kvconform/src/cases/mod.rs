//! The cases, by kernel. Each case runs for every backend and element type.

use kvcore::Error;

use crate::bench::{Bench, Failure, Outcome};

mod attend;
mod blocks;
mod capabilities;
pub(crate) mod graphs;
mod mass;
mod memory;
mod mla;
mod order;
mod quant;
mod reserve;
mod rope;
mod rows;
mod sparse;
mod tensor;

/// A case of the suite.
#[derive(Clone, Copy)]
pub struct Case {
    /// The case's name, in the form `kernel::what_is_claimed`.
    pub name: &'static str,
    /// Optional features that the case uses, by their names in [`OPTIONAL`](kvcore::OPTIONAL).
    pub needs: &'static [&'static str],
    body: fn(&Bench) -> Outcome,
}

impl Case {
    /// Runs the case. If the backend lists a feature that the case needs as missing, checks instead that the
    /// case ends with this backend's [`Error::Unsupported`].
    pub fn run(&self, bench: &Bench) -> Outcome {
        let missing = bench.backend.capabilities().missing;
        match self.needs.iter().find(|kernel| missing.contains(kernel)) {
            Some(kernel) => refused(bench, kernel, (self.body)(bench)),
            None => (self.body)(bench),
        }
    }
}

/// Checks that a feature listed as missing was refused with the right error.
fn refused(b: &Bench, what: &str, outcome: Outcome) -> Outcome {
    match outcome {
        Err(Failure { error: Some(Error::Unsupported { backend, .. }), .. })
            if backend == b.backend.name() =>
        {
            Ok(())
        }
        Err(failure) => Err(Failure::new(format!("{what} is missing, but the error is another: {failure}"))),
        Ok(()) => Err(Failure::new(format!("{what} is listed as missing, but works"))),
    }
}

macro_rules! cases {
    ($($module:ident::$name:ident $(needs [$($kernel:literal),*])?),* $(,)?) => {
        /// Every case in the suite.
        pub const CASES: &[Case] = &[$(Case {
            name: concat!(stringify!($module), "::", stringify!($name)),
            needs: &[$($($kernel),*)?],
            body: $module::$name,
        },)*];
    };
}

cases! {
    capabilities::no_required_kernel_or_type_is_missing,
    memory::is_zeroed_and_refuses_nothing,
    memory::reused_memory_is_zeroed,
    memory::host_copies_round_trip,
    memory::host_copies_check_length_and_density,
    memory::a_caller_may_reuse_the_bytes_that_it_wrote,
    reserve::memory_goes_and_comes_back_as_zeros_at_its_address needs ["reserve"],
    reserve::mapping_twice_keeps_contents_and_unmapping_twice_is_nothing needs ["reserve"],
    reserve::wrong_ranges_are_refused_and_change_nothing needs ["reserve"],
    reserve::kernels_work_on_reserved_memory needs ["reserve"],
    tensor::any_strides_equal_indexing,
    tensor::parts_of_one_storage_may_be_copied,
    tensor::elements_of_any_size_are_copied,
    tensor::tensors_go_to_the_device_and_back,
    tensor::wrong_tensor_copies_are_refused_and_write_nothing,
    order::a_stream_keeps_its_order,
    order::events_order_streams,
    order::events_call_back_when_they_are_done,
    order::dropping_handles_loses_no_work,
    order::writes_come_in_the_order_of_the_stream,
    order::enqueued_work_keeps_its_memory,
    order::work_of_a_dropped_stream_is_done,
    order::no_work_is_no_work,
    rows::scatter_puts_rows_where_slots_say,
    rows::k_and_v_may_differ_in_heads,
    rows::scatter_takes_head_major_rows,
    rows::scatter_rounds_f32_rows,
    rows::scatter_keeps_nan_and_infinity,
    rows::wrong_scatters_are_refused_and_write_nothing,
    rows::gather_reads_what_scatter_wrote,
    rows::gather_rotates_keys_on_the_way,
    rows::scatter_rotates_keys_on_the_way,
    blocks::copy_moves_all_layers_and_nothing_else,
    blocks::swap_goes_between_layouts,
    blocks::wrong_copies_are_refused,
    blocks::rotated_copies_equal_keys_rotated_there,
    blocks::rotation_keeps_length_and_the_original,
    rope::rows_are_rotated_in_both_pairings,
    rope::a_part_of_a_row_can_be_rotated,
    rope::the_attention_factor_enters_once,
    rope::positions_past_the_limit_are_refused,
    attend::prefill_and_decode_in_one_call,
    attend::many_queries_over_even_rows,
    attend::wide_heads,
    attend::k_and_v_may_differ_in_heads,
    attend::segments_at_offsets,
    attend::the_same_blocks_at_two_offsets_at_once,
    attend::causality_goes_by_logical_order,
    attend::windows_go_by_position,
    attend::softcap_temperature_and_groups,
    attend::layers_share_the_work_of_a_step,
    attend::rows_that_see_nothing_are_zero,
    attend::nan_reaches_the_output,
    attend::rotated_queries_need_no_table,
    attend::keys_may_lie_unrotated,
    attend::wrong_attends_are_refused,
    attend::output_in_the_element_type,
    attend::sequences_decode_in_the_type_of_their_cache,
    attend::output_may_lie_where_queries_do,
    quant::rows_read_back_within_the_bound_of_their_format,
    quant::what_is_not_finite_never_becomes_finite,
    quant::gathered_keys_are_rotated_in_f32,
    quant::copies_move_codes_and_scales,
    quant::rotated_keys_are_quantised_again,
    quant::attend_reads_quantised_blocks,
    quant::blocks_are_quantised_and_back needs ["quantize", "dequantize"],
    quant::wrong_conversions_are_refused needs ["quantize", "dequantize"],
    sparse::rows_see_selected_tokens_only needs ["selection"],
    sparse::rows_see_selected_blocks_only needs ["selection"],
    sparse::what_is_selected_must_be_visible_too needs ["selection"],
    sparse::an_empty_selection_sees_nothing needs ["selection"],
    sparse::selections_of_quantised_blocks needs ["selection"],
    sparse::wrong_selections_are_refused needs ["selection"],
    mla::the_latent_is_key_and_value needs ["attend_mla"],
    mla::many_queries_over_even_latents needs ["attend_mla"],
    mla::latents_of_the_usual_widths needs ["attend_mla"],
    mla::queries_may_come_rotated needs ["attend_mla"],
    mla::latents_may_be_selected needs ["attend_mla", "selection"],
    mla::latents_may_be_quantised needs ["attend_mla"],
    mla::rotated_parts_may_lie_unrotated needs ["attend_mla"],
    mla::moving_a_chunk_moves_the_rotated_part_only needs ["attend_mla"],
    mla::wrong_latent_attends_are_refused needs ["attend_mla"],
    mass::weights_are_added_for_each_token needs ["attend_mass"],
    mass::heads_may_share_keys needs ["attend_mass"],
    mass::many_queries_over_even_rows needs ["attend_mass"],
    mass::windows_factors_and_overlapping_positions needs ["attend_mass"],
    mass::empty_segments_and_rows_that_see_nothing needs ["attend_mass"],
    mass::keys_may_lie_unrotated needs ["attend_mass"],
    mass::quantised_blocks needs ["attend_mass"],
    mass::latents needs ["attend_mla", "attend_mass"],
    mass::wrong_masses_are_refused needs ["attend_mass"],
    graphs::a_replay_equals_the_eager_step needs ["graphs"],
    graphs::a_latent_replay_equals_the_eager_step needs ["graphs"],
    graphs::replays_follow_each_other_without_a_wait needs ["graphs"],
    graphs::a_cache_captures_what_comes_twice needs ["graphs"],
    graphs::what_cannot_be_captured_is_refused_by_name needs ["graphs"],
    graphs::wrong_inputs_are_refused_and_write_nothing needs ["graphs"],
    graphs::replays_count_as_the_operations_that_they_run needs ["graphs"],
    graphs::a_cache_captures_again_what_has_outgrown_its_graph needs ["graphs"],
    graphs::a_void_permit_is_refused_by_a_replay needs ["graphs"],
    graphs::a_capture_belongs_to_its_thread_and_its_streams needs ["graphs"],
}

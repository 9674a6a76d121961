// Copies rows whose offsets and lengths are multiples of 16 bytes: scatter, gather, copy_blocks, swap_blocks
// and copy_tensor if elements keep their type. One thread moves one unit of 16 bytes. All offsets, lengths
// and strides in args are counted in units.

@group(0) @binding(1) var<storage, read_write> source: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> dest: array<vec4<u32>>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = place_of(linear(group, groups) * THREADS + thread);
    if (place.inside) {
        dest[place.dst + place.at] = source[place.src + place.at];
    }
}

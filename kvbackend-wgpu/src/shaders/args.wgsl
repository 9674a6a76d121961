// The arguments of every kernel, and the linear index of a workgroup in a two-dimensional grid.

@group(0) @binding(0) var<storage, read> args: array<u32>;

fn linear(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}
